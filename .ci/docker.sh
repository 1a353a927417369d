#!/usr/bin/env bash
# A Docker engine for the tests, where there is none: `docker.sh start DIR` installs what is missing (apt), starts dockerd
# by hand with everything it keeps under DIR, and prints its address; `docker.sh stop DIR` ends it and removes DIR.
set -euo pipefail

# Ends the containerd of an engine that was killed: the next engine would wait for it.
end_containerd() {
  local file=$1/exec/containerd/containerd.pid pid
  pid=$(cat "$file" 2>/dev/null) || return 0
  if grep -q containerd "/proc/$pid/cmdline" 2>/dev/null; then
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 50); do test -d "/proc/$pid" || break; sleep 0.1; done
  fi
  rm -f "$file"
}

start() {
  local dir=$1 missing=()
  command -v dockerd >/dev/null || missing+=(docker.io)
  command -v busybox >/dev/null || missing+=(busybox-static)
  command -v bwrap >/dev/null || missing+=(bubblewrap)
  if ((${#missing[@]})); then
    { apt-get install -y --no-install-recommends "${missing[@]}" || { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; }; } >&2
  fi
  mkdir -p "$dir"
  if test -f "$dir/pid" && ! grep -q dockerd "/proc/$(cat "$dir/pid")/cmdline" 2>/dev/null; then
    end_containerd "$dir"
    rm -f "$dir/pid"
  fi
  setsid dockerd -H "unix://$dir/docker.sock" --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/pid" \
    --group root --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \
    --storage-driver="${AGENTRL_DOCKER_STORAGE:-overlay2}" --log-driver=json-file --log-opt max-size=1m --log-opt max-file=1 \
    >"$dir/log" 2>&1 </dev/null &
  local engine=$!
  for _ in $(seq 300); do
    if docker -H "unix://$dir/docker.sock" version >/dev/null 2>&1; then
      echo "unix://$dir/docker.sock"
      return
    fi
    kill -0 "$engine" 2>/dev/null || break
    sleep 0.2
  done
  echo "dockerd did not answer within 60 s; its log ends:" >&2
  tail -20 "$dir/log" >&2
  return 1
}

stop() {
  local dir=$1 pid
  if pid=$(cat "$dir/pid" 2>/dev/null); then
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 150); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
    kill -9 "$pid" 2>/dev/null || true
  fi
  # A killed engine leaves its containerd, the shims of its containers and their mounts.
  end_containerd "$dir"
  for place in /proc/[0-9]*; do
    if tr '\0' ' ' 2>/dev/null <"$place/cmdline" | grep -qF -- "-address $dir/exec/"; then kill -9 "${place#/proc/}" 2>/dev/null || true; fi
  done
  awk -v dir="$dir/" 'index($2, dir) == 1 {print $2}' /proc/mounts | sort -r | while read -r place; do umount -l "$place"; done
  rm -rf "$dir"
}

case "${1:-}" in
  start | stop) "$1" "${2:?folder}" ;;
  *) echo "usage: $0 start|stop DIR" >&2; exit 2 ;;
esac
