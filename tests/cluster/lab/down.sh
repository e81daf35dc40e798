#!/bin/bash
# down.sh: stop the lab, by the process ids its own files name. LAB=... and BR=... as for up.sh.
LAB=${LAB:-${TMPDIR:-/tmp}/mpicoll-lab}; BR=${BR:-lab0}
alive() { # a zombie counts as gone: process 1 of a container may not reap it
  local s; s=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -c1); [ -n "$s" ] && [ "$s" != Z ]; }
stop() { # pidfile expected-command
  local p; p=$(cat "$1" 2>/dev/null) || return 0
  if [ -n "$p" ] && [ "$(cat "/proc/$p/comm" 2>/dev/null)" = "$2" ] && alive "$p"; then
    kill "$p" 2>/dev/null
    for _ in $(seq 1 100); do alive "$p" || break; sleep 0.05; done
    alive "$p" && kill -9 "$p" 2>/dev/null
  fi
  rm -f "$1"
}
if [ -S "$LAB/run/munge.sock" ] && [ -s "$LAB/run/slurmctld.pid" ]; then
  export SLURM_CONF="$LAB/etc/slurm.conf"
  # slurmstepd outlives slurmd: end the jobs first, and let KillWait (5 s) pass if some linger
  if [ -n "$(timeout 5 squeue -h 2>/dev/null)" ]; then
    timeout 5 scancel -u root 2>/dev/null
    for _ in $(seq 1 80); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
  fi
fi
stop "$LAB/run/slurmctld.pid" slurmctld
for f in "$LAB"/run/slurmd.*.pid; do [ -e "$f" ] && stop "$f" slurmd; done
stop "$LAB/run/munged.pid" munged
for ns in $(ip netns list 2>/dev/null | awk -v b="$BR-n" 'index($1,b)==1{print $1}'); do ip netns del "$ns"; done
ip link show "$BR" >/dev/null 2>&1 && ip link del "$BR"
[ "${1:-}" = quiet ] || echo "down"
exit 0
