"""The checks of `megatron-balance doctor`: packages, hooks and flags of one machine, then all ranks of a cluster.

Under torchrun ranks first meet in its store, which needs no interface of gloo's: there they compare versions, flags and
problems, and say where gloo would listen. Then they make a group over gloo and measure it. Only the first rank reports.

Invariants: only imports change this process; every problem names its remedy.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import platform
import resource
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import hooks_of_release, install_hooks
from megatron_balance.mcore.setup.flags import parse_flags
from megatron_balance.mcore.setup.rules import cautions, nothing_balances, problems
from megatron_balance.mcore.setup.settings import policy_of, run_costs, topology_of
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.process import device_kind, files_needed, ranks_of_node, version_of
from megatron_balance.version import build_version

if TYPE_CHECKING:
    from megatron_balance.runtime.start import Meeting

TIMEOUT = timedelta(seconds=60)
IFNAME = "GLOO_SOCKET_IFNAME"
BYTES_OF_A_TOKEN = 28
"""Of a row: tokens, labels and positions as int64, a loss mask as float32."""

COMPARED = ("megatron-core", "torch", "numpy", "transformer-engine")
"""Packages whose other versions might plan or compute differently."""

_NUM_BYTES = 16 << 20
_SIOCGIFADDR = 0x8915


class Finding(NamedTuple):
    """One line of the report: a check that passed or not, and the remedy where it did not; or a note."""

    ok: bool
    message: str
    is_note: bool = False


def check_packages() -> Iterator[Finding]:
    """Check that the packages of a run load, and name their versions."""
    yield Finding(True, f"megatron-balance {build_version()}, Python {platform.python_version()}")
    yield (found := _loaded("torch", package="torch", remedy="pip install '.[megatron]' in a clone"))
    if not found.ok:
        return
    from megatron_balance.mcore.hooks import supported_version

    try:
        package = f"megatron-core {supported_version()}"
    except BalanceError as error:
        yield Finding(False, str(error))
    else:
        remedy = "pip install '.[megatron]' in a clone, or set PYTHONPATH to a Megatron-LM checkout"
        yield _loaded("megatron.training", package=package, remedy=remedy)
    # The local attention of Megatron refuses packed sequences; Transformer Engine's takes them.
    if torch.cuda.is_available():
        yield Finding(True, torch.cuda.get_device_name())
        remedy = "GPUs run packed sequences through it: pip install 'transformer-engine[pytorch]'"
        yield _loaded("transformer_engine.pytorch", package="transformer-engine", remedy=remedy)
    else:
        yield Finding(True, "no GPU: training needs one, and transformer-engine")
    libraries = {"Transformer Engine": version_of("transformer-engine"), "cuDNN": _cudnn_version()}
    if said := ", ".join(f"{name} {version}" for name, version in libraries.items() if version):
        text = "may build or choose attention kernels for each number of sequences and max_seqlen; balanced"
        yield Finding(True, f"{said}: {text} micro-batches have few values of the two (docs/megatron.md)")


def _cudnn_version() -> str | None:
    """The version of the cuDNN that torch has loaded: 91002 is 9.10.2, 8902 is 8.9.2."""
    with contextlib.suppress(RuntimeError):  # torch refuses another one than it was built with
        if number := torch.backends.cudnn.version():
            unit = 10_000 if number >= 90_000 else 1_000
            return f"{number // unit}.{number % unit // 100}.{number % 100}"
    return None


def _loaded(module: str, *, package: str, remedy: str) -> Finding:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return Finding(False, f"{module} of {package} does not load: {error}; {remedy}")
    return Finding(True, f"{package} {'' if ' ' in package else version_of(package)} loads")


def check_hooks() -> Iterator[Finding]:
    """Each hook, put in place and taken out again; they must not be in place. What some runs alone need is noted."""
    from megatron_balance.mcore.hooks import HOOKS, supported_version

    try:
        version = supported_version()
    except BalanceError as error:
        yield Finding(False, f"no hook applies: {error}")
        return
    for hook in hooks_of_release(HOOKS, version):
        try:
            install_hooks([hook], version=f"megatron-core {version}").undo()
            yield Finding(True, f"{hook.target}: {hook.reason}")
        except BalanceError as error:
            where = f" Runs with {hook.needed} alone need it." if hook.needed else ""
            yield Finding(bool(hook.needed), f"{error}{where}", is_note=bool(hook.needed))


def check_environment() -> Iterator[Finding]:
    """What a run takes from this machine's limits, environment and metadata (docs/megatron.md has the variables)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding(True, f"open files: {soft}, which a run raises up to {hard} (docs/scale.md has its need)")
    pip = _metadata_version("megatron-core")
    if pip != (imported := version_of("megatron-core")):
        yield Finding(True, f"pip has megatron-core {pip}, {imported} is imported: the second counts", is_note=True)
    cores, (ranks, source) = len(os.sched_getaffinity(0)), ranks_of_node()
    if ranks and cores < 3 * ranks:
        needs = "trains, prepares steps and plans in one thread each, beside loader workers"
        yield Finding(True, f"{cores} CPU cores for {ranks} ranks (by {source}): a rank {needs}", is_note=True)
    for name, (advice, is_worth_saying) in VARIABLES.items():
        value = os.environ.get(name)
        if is_worth_saying(value):
            yield Finding(True, f"{name} is {value or 'not set'}: {advice}", is_note=True)


def _metadata_version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package).partition("+")[0]
    return None


VARIABLES: dict[str, tuple[str, Callable[[str | None], bool]]] = {
    "MEGATRON_BALANCE": ("no run balances", lambda value: value == "0"),
    "MEGATRON_BALANCE_ANY_VERSION": ("releases that were not tested are allowed", lambda value: value == "1"),
    "TORCH_GLOO_LAZY_INIT": ("all ranks of a group connect when it is made; unset it", lambda value: value == "0"),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": (
        "ranks that torchrun starts again would meet in the store of those before; set it to 1",
        lambda value: value != "1" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
    ),
    "OMP_NUM_THREADS": (
        "the thread that prepares steps takes all cores; set it, to 1 for a start",
        lambda value: value is None and "RANK" in os.environ,
    ),
    "LOCAL_WORLD_SIZE": (
        "ranks of a node are taken from another launcher's variables, or the GPUs",
        lambda value: value is None and "RANK" in os.environ,
    ),
    "PYTORCH_CUDA_ALLOC_CONF": (
        "lengths that change fragment memory; set expandable_segments:True",
        lambda value: device_kind() == "cuda" and torch.cuda.is_available() and "expandable" not in (value or ""),
    ),
}
"""Of the environment: advice, and when it is given; GLOO_SOCKET_IFNAME is checked where ranks meet."""


def check_flags(flags: Sequence[str]) -> Iterator[Finding]:
    """Check the flags of a training script together, as far as possible before Megatron validates them."""
    try:
        args, unknown = parse_flags(flags, with_megatron=True)
    except BalanceError as error:
        yield Finding(False, f"Megatron's parser refuses: {error} See its --help.")
        return
    except ImportError as error:
        yield Finding(False, f"flags were not read: {error}. Repair megatron-core first, see above.")
        return
    options = vars(args)
    for flag in unknown:
        if "balance" in flag:
            yield Finding(False, f"{flag} is not a known flag")
        elif flag.startswith("--"):
            yield Finding(True, f"{flag} is left to your script: Megatron does not know it")
    refused = problems(options)
    if nothing_balances(options) and not refused:
        yield Finding(True, "no balance flag is set: the run is stock; add --balance-data to balance it")
        return
    broken = [Finding(False, problem) for problem in refused]
    yield from (Finding(True, caution, is_note=True) for caution in cautions(args))
    # A checkpoint's own arguments are read when the run begins.
    if not broken and not args.use_checkpoint_args:
        args.vocab_size = args.vocab_size or 1  # in a run the tokenizer sets it
        args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        try:
            topology = topology_of(options)
            needed = files_needed(topology.num_sockets)
            yield Finding(True, f"open files: a rank of {args.world_size} (WORLD_SIZE) needs up to {needed}")
            run_costs(options, topology=topology, shape=lambda: ModelShape.from_megatron_args(args))
        except BalanceError as error:
            broken.append(Finding(False, str(error)))
    yield from broken or [Finding(True, f"{policy_of(options)}: these flags go together")]


def check_cluster(*, flags: Sequence[str], found: Sequence[str]) -> Iterator[Finding]:
    """Meet with the other ranks; every rank of the world calls it, with the problems found so far."""
    from torch.distributed.rendezvous import rendezvous

    from megatron_balance.runtime.start import Meeting, agree

    # What MASTER_ADDR and MASTER_PORT lead to is the store of torchrun's agent, or that of rank 0.
    store, rank, num_ranks = next(rendezvous("env://", timeout=TIMEOUT))
    meeting = Meeting(store, rank=rank, num_ranks=num_ranks, timeout=TIMEOUT)
    try:
        texts = agree({}, meeting=meeting, topic="the doctor", said=json.dumps(_here()))
    except BalanceError as error:
        yield Finding(False, str(error))
        return
    places = [_Place(*json.loads(text)) for text in texts]
    hosts = list(dict.fromkeys(place.host for place in places))
    yield Finding(True, f"{num_ranks} ranks on {len(hosts)} hosts meet in the store: {', '.join(hosts)}")
    settings = {f"version of {package}": version_of(package) or "none" for package in COMPARED}
    settings |= {"version of megatron_balance": build_version(), "version of python": platform.python_version()}
    settings["the command line"] = " ".join(flags)
    try:
        agree(settings, meeting=meeting, topic="versions and flags", problem="; ".join(found) or None)
        yield Finding(True, "all ranks have the same versions and flags")
    except BalanceError as error:
        yield Finding(False, str(error))
    meets = True
    for place in dict.fromkeys(places):
        problem = place.problem(several_hosts=len(hosts) > 1)
        where = f"{place.host}: gloo listens on {place.address} ({place.interface or 'no interface'})"
        yield Finding(not problem, problem or f"{where}, {IFNAME} is {place.chosen or 'not set'}")
        meets = meets and not problem
    if meets:  # else ranks would wait for each other until the timeout
        yield from _measured(meeting, places=places, flags=flags)


class _Place(NamedTuple):
    """Where a rank runs, the address and interface that gloo would listen on there, and the way to MASTER_ADDR."""

    host: str
    chosen: str
    address: str
    interface: str
    towards_master: str

    def problem(self, *, several_hosts: bool) -> str:
        """The reason why ranks of other hosts would not find this one; empty where there is none."""
        advice = f"set {IFNAME}={self.towards_master or 'the interface that reaches the other hosts'} on {self.host}"
        if self.chosen and not self.address:
            return f"{self.host}: {IFNAME} is {self.chosen}, which has no address here; {advice}"
        if several_hosts and (not self.address or self.address.startswith("127.")):
            found = f"{self.address} ({self.interface})" if self.address else "no address"
            return f"{self.host}: gloo would listen on {found}, where no other host reaches it; {advice}"
        return ""


def _here() -> _Place:
    host, chosen = socket.gethostname(), os.environ.get(IFNAME, "")
    address = towards_master = ""
    interfaces: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                interfaces[socket.inet_ntoa(answer[20:24])] = name
        with contextlib.suppress(OSError):  # this host's address on the way to MASTER_ADDR; nothing is sent
            probe.connect((os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "1"))))
            towards_master = interfaces.get(probe.getsockname()[0], "")
    if chosen:
        address = next((address for address, name in interfaces.items() if name == chosen.split(",")[0]), "")
    else:
        try:
            address = socket.gethostbyname(host)
        except OSError:
            address = "127.0.0.1"  # as torch does
    return _Place(host, chosen, address, interfaces.get(address, ""), towards_master)


def _measured(meeting: Meeting, *, places: Sequence[_Place], flags: Sequence[str]) -> Iterator[Finding]:
    """Time what a step does: ranks gather a few numbers, and send samples to ranks of other hosts."""
    import torch
    import torch.distributed as dist

    rank, num_ranks, started = meeting.rank, meeting.num_ranks, time.perf_counter()

    def seconds_of(job: Callable[[], object], *, times: int) -> list[float]:
        taken = []
        for _ in range(times):
            dist.barrier()
            begun = time.perf_counter()
            job()
            taken.append(time.perf_counter() - begun)
        return taken

    def gather(*numbers: float) -> list[float]:
        of_all = torch.zeros(num_ranks * len(numbers), dtype=torch.float64)
        dist.all_gather_into_tensor(of_all, torch.tensor(numbers, dtype=torch.float64))
        return of_all.tolist()

    def send_on() -> None:
        half = num_ranks // 2  # that far away is another host, where there are several
        works = dist.irecv(received, (rank - half) % num_ranks), dist.isend(sent, (rank + half) % num_ranks)
        for work in filter(None, works):
            work.wait()

    try:
        store = dist.distributed_c10d.PrefixStore("doctor", meeting.store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        seconds_to_meet = time.perf_counter() - started
        latency = statistics.median(seconds_of(lambda: gather(*range(8)), times=20))
        sent, received = torch.zeros(_NUM_BYTES, dtype=torch.uint8), torch.empty(_NUM_BYTES, dtype=torch.uint8)
        of_ranks = gather(seconds_of(send_on, times=3)[-1])  # the first one connects
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        remedy = f"open TCP between the hosts on all ports, or set {IFNAME} to the interface that reaches the others"
        yield Finding(False, f"gloo: {str(error).splitlines()[0]}; {remedy}")
        return
    meeting_says = f"a group of all ranks is made in {seconds_to_meet:.1f} s"
    yield Finding(True, f"{meeting_says}, a gather takes {1e3 * latency:.2f} ms")
    slowest = max(range(num_ranks), key=of_ranks.__getitem__)
    fastest, speed = (_NUM_BYTES / seconds for seconds in (min(of_ranks), of_ranks[slowest]))
    yield Finding(
        True,
        f"ranks receive {_NUM_BYTES >> 20} MiB from far ranks at {speed / 1e6:.0f} to {fastest / 1e6:.0f} MB/s, "
        f"slowest on rank {slowest} ({places[slowest].host})",
    )
    needs, most = "the first step needs TCP on all ports between these addresses", 0.0
    with contextlib.suppress(BalanceError, ImportError):  # said above
        args, _ = parse_flags(flags, with_megatron=True)
        most = (args.seq_length or 0) * (args.global_batch_size or 0) * BYTES_OF_A_TOKEN / num_ranks
    if most:
        needs += f"; if every sample moves, a rank sends {most / 2**20:.1f} MiB in {most / speed:.2f} s, while the "
        needs += "step before runs"
    yield Finding(True, needs)
