#!/usr/bin/env bash
# Runs an upstream's own tests, unmodified, on a checkout of it, with this package's adapter on. The checkout may lie
# anywhere and is not written to; the environment is made under build/.
#
#   scripts/check_upstream.sh CHECKOUT [ARGS ...]      ARGS go to scripts/upstream/check_NAME.sh
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
checkout=${1:?give the path of a checkout of Megatron-LM, slime, verl, AReaL, TorchSpec or recsys-examples}
shift
checkout=$(cd "$checkout" && pwd)

# A name and a file that only its checkout has.
while read -r name file; do
    [[ -e $checkout/$file ]] || continue
    check=$here/upstream/check_$name.sh
    [[ -x $check ]] || { echo "check_upstream.sh: $checkout is $name, and there is no $check" >&2; exit 2; }
    exec "$check" "$checkout" "$@"
done <<'NAMES'
megatron pretrain_gpt.py
slime slime/utils/dp_schedule.py
verl verl/utils/seqlen_balancing.py
areal areal/__init__.py
torchspec torchspec/__init__.py
recsys examples/commons/distributed/batch_shuffler.py
NAMES
echo "check_upstream.sh: $checkout is none of megatron, slime, verl, areal, torchspec, recsys" >&2
exit 2
