#!/usr/bin/env bash
# An external run on one machine, to see how it goes: a conductor, two engines, two trainer hosts, a rollout worker.
#
#   bash examples/cluster/by_hand.sh run.toml [SECTION.KEY=VALUE ...]
#
# On a cluster the same commands run on different hosts, with the conductor's address for 127.0.0.1.
set -euo pipefail
config=${1:?usage: by_hand.sh RUN.TOML}
shift
port=${AGENTRL_PORT:-7700}
AGENTRL_CLUSTER_TOKEN=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')
export AGENTRL_CLUSTER_TOKEN
logs=$(mktemp -d)
for role in engine engine trainer trainer rollout; do
  agentrl worker --role "$role" --conductor "http://127.0.0.1:$port" >>"$logs/$role.log" 2>&1 &
done
echo "the workers' logs are in $logs"
agentrl train "$config" cluster.kind=external cluster.port="$port" cluster.rollout_workers=1 engine.count=2 train.ranks=2 "$@"
wait
