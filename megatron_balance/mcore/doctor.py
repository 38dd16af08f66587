"""The checks of `megatron-balance doctor`: packages, hooks and flags of one machine, then all ranks of a cluster.

Under torchrun ranks first meet in its store, which needs no interface of gloo's: there they compare versions, flags and
problems, and say where gloo would listen. Then they make a group over gloo and measure it. Only the first rank reports.

Invariants: only imports change this process; every problem names its remedy.
"""

from __future__ import annotations

import difflib
import fcntl
import importlib
import json
import os
import platform
import socket
import statistics
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_balance import __version__
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.options import (
    cautions,
    executor_runs_our_plan,
    nothing_balances,
    problems,
    stock_notice,
    why_stock,
)
from megatron_balance.mcore.setup.flags import parse_flags
from megatron_balance.mcore.setup.settings import costs_of_args, policy_of

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

TIMEOUT = timedelta(seconds=60)
IFNAME = "GLOO_SOCKET_IFNAME"
BYTES_OF_A_TOKEN = 28
"""Of a row: tokens, labels and positions as int64, a loss mask as float32."""

COMPARED = ("megatron-core", "torch", "numpy", "transformer-engine")
"""Packages whose other versions might plan or compute differently."""

_NUM_BYTES = 16 << 20
_SIOCGIFADDR = 0x8915


class Finding(NamedTuple):
    """One line of the report: a check that passed or not, and the remedy where it did not."""

    ok: bool
    says: str


def check_packages() -> Iterator[Finding]:
    """Check that the packages of a run load, and name their versions."""
    yield Finding(True, f"megatron-balance {__version__}, Python {platform.python_version()}")
    try:
        import torch

        from megatron_balance.runtime.process import environment
    except ImportError as error:
        yield Finding(False, f"torch: {error}. Install it: pip install 'megatron-balance[megatron]'")
        return
    has_gpu = torch.cuda.is_available()
    hardware = environment("cuda" if has_gpu else "cpu")
    where = hardware["device"] if has_gpu else f"no GPU ({hardware['device']}): training needs one"
    yield Finding(True, f"torch {torch.__version__}, {where}")
    yield _megatron()
    # The local attention of Megatron refuses packed sequences; Transformer Engine's takes them.
    engine, remedy = hardware["versions"].get("transformer-engine"), "pip install 'transformer-engine[pytorch]'"
    if engine is None:
        yield Finding(
            not has_gpu, f"transformer-engine is not installed; GPUs run packed sequences through it: {remedy}"
        )
        return
    try:
        if has_gpu:
            importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        yield Finding(False, f"transformer-engine {engine} does not load: {error}. Build it for this torch: {remedy}")
    else:
        yield Finding(True, f"transformer-engine {engine}")


def _megatron() -> Finding:
    from megatron_balance.mcore.hooks import supported_version

    try:
        version = supported_version()
        importlib.import_module("megatron.training")
    except BalanceError as error:
        return Finding(False, str(error))
    except ImportError as error:
        return Finding(
            False,
            f"megatron.training does not load: {error}. Its wheel holds it with the extra [training]: pip install "
            "'megatron-balance[megatron]', or set PYTHONPATH to a Megatron-LM checkout.",
        )
    # After the + Megatron puts the commit of the repository that this process was started in.
    return Finding(True, f"megatron-core {version.partition('+')[0]}, with megatron.training")


def check_hooks() -> Iterator[Finding]:
    """Each hook by itself, put in place and taken out again. The package's own must not be in place."""
    from megatron_balance.hooking.patches import install
    from megatron_balance.mcore.hooks import hooks_of, supported_version
    from megatron_balance.mcore.packing_scheduler import NAME, SEAM, register

    try:
        version = supported_version()
    except BalanceError as error:
        yield Finding(False, f"no hook applies: {error}")
        return
    for hook in hooks_of(version):
        try:
            install([hook], version=f"megatron-core {version}").undo()
        except BalanceError as error:
            yield Finding(False, str(error))
        else:
            yield Finding(True, f"{hook.target}: {hook.why}")
    registration = register()
    if registration is not None:
        registration.undo()
        yield Finding(True, f"{SEAM}: sequence_packing_scheduler may be {NAME!r}")


def check_flags(flags: Sequence[str]) -> Iterator[Finding]:
    """Check the flags of a training script together, as far as possible before Megatron validates them."""
    try:
        args, unknown = parse_flags(flags, of_megatron=True)
    except BalanceError as error:
        yield Finding(False, f"Megatron's parser refuses: {error} See its --help.")
        return
    except ImportError as error:
        yield Finding(False, f"flags were not read: {error}. Repair megatron-core first, see above.")
        return
    options = vars(args)
    yield from _unknown(unknown, known=[name.replace("_", "-") for name in options])
    refused = problems(options)
    if nothing_balances(options) and not refused:
        yield Finding(True, "no flag asks for balancing: the run is stock; add --balance-data to balance it")
        return
    broken = [Finding(False, problem) for problem in refused]
    reason = why_stock(args)
    if reason is not None and executor_runs_our_plan(options):
        yield Finding(True, stock_notice(options, reason=reason))
    elif reason is not None:
        broken.append(Finding(False, f"the run would stay stock: {reason}"))
    yield from (Finding(True, caution) for caution in cautions(args))
    # A checkpoint's own arguments are read when the run begins.
    if not broken and not args.use_checkpoint_args:
        args.vocab_size = args.vocab_size or 1  # in a run the tokenizer sets it
        try:
            costs_of_args(args)
        except BalanceError as error:
            broken.append(Finding(False, str(error)))
    yield from broken or [Finding(True, f"{policy_of(options)}: these flags go together")]


def _unknown(unknown: Sequence[str], *, known: Sequence[str]) -> Iterator[Finding]:
    """Unknown flags: a misspelt balance flag is a problem, others belong to the script."""
    for flag in unknown:
        if not flag.startswith("--"):
            continue
        name = flag.removeprefix("--").split("=")[0]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if near or "balance" in name:
            remedy = f": did you mean --{near[0]}?" if near else ""
            yield Finding(False, f"{flag} is no flag of Megatron or this package{remedy}")
        else:
            yield Finding(True, f"{flag} is left to your script: Megatron does not know it")


def check_cluster(*, flags: Sequence[str], found: Sequence[str]) -> Iterator[Finding]:
    """Meet with the other ranks; every rank of the world calls it.

    Args:
        flags: of the training script.
        found: problems of this rank.
    """
    from torch.distributed.rendezvous import rendezvous

    from megatron_balance.runtime.start import Meeting, gather_texts

    # What MASTER_ADDR and MASTER_PORT lead to is the store of torchrun's agent, or that of rank 0.
    store, rank, num_ranks = next(rendezvous("env://", timeout=TIMEOUT))
    meeting = Meeting(store, rank=rank, num_ranks=num_ranks, timeout=TIMEOUT)
    said = json.dumps([_here(), _versions() | {"the command line": " ".join(flags)}, found])
    try:
        all_said = [json.loads(text) for text in gather_texts(said, meeting=meeting, topic="the doctor")]
    except BalanceError as error:
        yield Finding(False, str(error))
        return
    places = [_Place(*place) for place, _, _ in all_said]
    hosts = list(dict.fromkeys(place.host for place in places))
    yield Finding(True, f"{num_ranks} ranks on {len(hosts)} hosts meet in the store: {', '.join(hosts)}")
    yield from _compared([settings for _, settings, _ in all_said], found=[of_rank for _, _, of_rank in all_said])
    meets = True
    for place in dict.fromkeys(places):
        problem = place.problem(several_hosts=len(hosts) > 1)
        where = f"{place.host}: gloo listens on {place.address} ({place.interface or 'no interface'})"
        yield Finding(not problem, problem or f"{where}, {IFNAME} is {place.chosen or 'not set'}")
        meets = meets and not problem
    if meets:  # else ranks would wait for each other until the timeout
        yield from _measured(store, rank=rank, places=places, flags=flags)


class _Place(NamedTuple):
    """Where a rank runs, and where gloo would listen there.

    Attributes:
        host: its name.
        chosen: GLOO_SOCKET_IFNAME, or empty.
        address: that gloo listens on; empty where there is none.
        interface: that has this address; empty where none has.
        towards_master: the interface by which MASTER_ADDR is reached, or empty.
    """

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
    interfaces: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # it has no IPv4 address
                continue
            interfaces[name] = socket.inet_ntoa(answer[20:24])
        towards = ""
        try:  # this host's address on the way to MASTER_ADDR; nothing is sent
            probe.connect((os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "1"))))
            towards = probe.getsockname()[0]
        except OSError:
            pass
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "127.0.0.1"  # as torch does
    address = interfaces.get(chosen.split(",")[0], "") if chosen else address
    of_address = {address: name for name, address in interfaces.items()}
    return _Place(host, chosen, address, of_address.get(address, ""), of_address.get(towards, ""))


def _versions() -> dict[str, str]:
    said = {"version of megatron_balance": __version__, "version of python": sys.version.split()[0]}
    for name in COMPARED:
        try:
            said[f"version of {name}"] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            said[f"version of {name}"] = "none"
    return said


def _compared(settings: Sequence[Mapping[str, str]], *, found: Sequence[Sequence[str]]) -> Iterator[Finding]:
    from megatron_balance.runtime.comm import named_ranks
    from megatron_balance.runtime.start import differences

    differ = differences(settings)
    yield Finding(not differ, differ or "all ranks have the same versions and flags")
    ranks_with: dict[str, list[int]] = {}
    for rank, problem in ((rank, problem) for rank, of_rank in enumerate(found) for problem in of_rank):
        if problem not in found[0]:  # those of rank 0 are printed above
            ranks_with.setdefault(problem, []).append(rank)
    yield from (Finding(False, f"{named_ranks(ranks)}: {problem}") for problem, ranks in ranks_with.items())


def _measured(store: Store, *, rank: int, places: Sequence[_Place], flags: Sequence[str]) -> Iterator[Finding]:
    """Time what a step does: ranks gather a few numbers, and send samples to ranks of other hosts."""
    import torch.distributed as dist

    num_ranks, started = len(places), time.perf_counter()
    try:
        store = dist.distributed_c10d.PrefixStore("doctor", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        seconds_to_meet = time.perf_counter() - started
        latency, of_ranks = _gather_and_message_seconds(rank, num_ranks)
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        remedy = f"open TCP between the hosts on all ports, or set {IFNAME} to the interface that reaches the others"
        yield Finding(False, f"gloo: {str(error).splitlines()[0]}; {remedy}")
        return
    yield Finding(
        True, f"a group of all ranks is made in {seconds_to_meet:.1f} s, a gather takes {1e3 * latency:.2f} ms"
    )
    slowest = max(range(num_ranks), key=of_ranks.__getitem__)
    fastest, speed = (_NUM_BYTES / seconds for seconds in (min(of_ranks), of_ranks[slowest]))
    yield Finding(
        True,
        f"ranks receive {_NUM_BYTES >> 20} MiB from the next host at {fastest / 1e6:.0f} to {speed / 1e6:.0f} MB/s, "
        f"slowest on rank {slowest} ({places[slowest].host})",
    )
    needs = "the first step needs TCP on all ports between these addresses"
    try:
        args, _ = parse_flags(flags, of_megatron=True)
        most = (args.seq_length or 0) * (args.global_batch_size or 0) * BYTES_OF_A_TOKEN / num_ranks
    except (BalanceError, ImportError):
        most = 0.0  # said above
    if most:
        needs += f"; if every sample moves, a rank sends {most / 2**20:.1f} MiB in {most / speed:.2f} s, while the "
        needs += "step before runs"
    yield Finding(True, needs)


def _gather_and_message_seconds(rank: int, num_ranks: int) -> tuple[float, list[float]]:
    """The median of a gather; for each rank the time until a large message has come from one host before."""
    import torch
    import torch.distributed as dist

    from megatron_balance.runtime.process import local_world_size

    def timed(job: Any) -> float:
        dist.barrier()
        started = time.perf_counter()
        job()
        return time.perf_counter() - started

    own, of_all = torch.zeros(8, dtype=torch.int64), torch.zeros(8 * num_ranks, dtype=torch.int64)
    latency = statistics.median(timed(lambda: dist.all_gather_into_tensor(of_all, own)) for _ in range(20))
    distance = local_world_size() or 1
    distance = distance if distance < num_ranks else 1
    sent, received = torch.zeros(_NUM_BYTES, dtype=torch.uint8), torch.empty(_NUM_BYTES, dtype=torch.uint8)

    def receive() -> None:
        arrives = dist.irecv(received, (rank - distance) % num_ranks)
        dist.send(sent, (rank + distance) % num_ranks)
        assert arrives is not None, "this rank is in the group"
        arrives.wait()

    seconds = [timed(receive) for _ in range(3)][-1]  # the first one connects
    of_ranks = torch.zeros(num_ranks, dtype=torch.float64)
    dist.all_gather_into_tensor(of_ranks, torch.tensor([seconds], dtype=torch.float64))
    return latency, of_ranks.tolist()
