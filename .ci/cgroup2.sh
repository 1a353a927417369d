#!/usr/bin/env bash
# Runs a command, as root at the top of the project, under a kernel of its own whose only cgroups are of version 2:
# `bash .ci/cgroup2.sh .venv/bin/python -m pytest …`. The kernel is User Mode Linux, a process of this machine; it sees
# the machine's files, which it cannot change, and fresh /tmp, /run and /sys. `--install` fetches it (apt, 41 MB).
# Ends with the command's code, or with 125 where this machine does not let such a kernel start.
set -euo pipefail
if test "${1-}" = --install; then
  apt-get install -y -qq --no-install-recommends user-mode-linux >/dev/null 2>&1 && exit
  apt-get update -qq >&2
  exec apt-get install -y -qq --no-install-recommends user-mode-linux >/dev/null
fi

# What the new kernel starts first.
if test "$$" = 1; then
  echo "the kernel runs"
  mount -t proc proc /proc
  command=$(cat "$job") top=$top
  mount --bind "$top" /mnt
  mount -t sysfs sysfs /sys
  mount -t tmpfs tmpfs /run
  mount -t tmpfs -o size=400m,mode=1777 tmpfs /tmp
  mkdir -p /dev/shm
  mount -t tmpfs -o mode=1777 tmpfs /dev/shm
  busybox ip link set lo up
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
  echo "+memory +pids +cpu" >/sys/fs/cgroup/cgroup.subtree_control
  mkdir -p "$top"
  test -e "$top/.ci" || mount --bind /mnt "$top" # it lay below /tmp
  cd "$top"
  code=0
  eval "$command" || code=$?
  echo "exit code $code"
  busybox poweroff -f
fi

cd "$(dirname "$0")/.."
kernel=${AGENTRL_UML:-$(command -v linux.uml)}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
{ printf 'export PATH=%q HOME=%q OMP_NUM_THREADS=1; ' "$PATH" "$HOME"; printf '%q ' "$@"; } >"$scratch/job"
TMPDIR=$scratch timeout -k 5 "${CGROUP2_SECONDS:-600}" "$kernel" mem=2000M uml_dir="$scratch/" root=/dev/root rootfstype=hostfs rootflags=/ ro quiet \
  init="$PWD/.ci/cgroup2.sh" job="$scratch/job" top="$PWD" con=null con0=fd:0,fd:1 </dev/null 2>&1 | tee "$scratch/said" || true # what the kernel said tells
code=$(sed -n 's/^exit code \([0-9]*\)\r*$/\1/p' "$scratch/said" | tail -1)
grep -q "^the kernel runs" "$scratch/said" || exit 125 # some processors have registers that it cannot handle
exit "${code:-1}"
