#!/bin/bash
# up.sh [NODES=4] [CPUS_PER_NODE=4] [GPUS_PER_NODE=0]
# A real Slurm with several hosts on one machine: munged, slurmctld and one slurmd per host. Needs root; no
# systemd, no control groups. Stops an earlier lab of the same folder, starts afresh, prints sinfo.
#   LAB=DIR     where all state lives; a system's own Slurm is not touched
#   MODE=net    every host has its own name, /etc/hosts, /dev/shm, network namespace and address   [default]
#   MODE=uts    the same without a network of its own
#   RATE=500mbit  MODE=net: shape every host's link, in both directions
#   PARTITIONS="gpu long" FEATURES=a,b GPUTYPE=a100   what scripts of other sites ask for; GPUs are /dev/null
#   MPI_DEFAULT=none|pmi2|pmix   what srun uses without --mpi
# Afterwards: source $LAB/env.sh
set -euo pipefail
N=${1:-4}; CPUS=${2:-4}; GPUS=${3:-0}
LAB=${LAB:-${TMPDIR:-/tmp}/mpicoll-lab}; MODE=${MODE:-net}
PARTITIONS=${PARTITIONS:-}; FEATURES=${FEATURES:-}; GPUTYPE=${GPUTYPE:-fake}
CTLPORT=${CTLPORT:-16817}; NODEPORT0=${NODEPORT0:-17000}
NETPFX=${NETPFX:-10.88.0}; BR=${BR:-lab0}   # bridge name: at most 12 characters
HERE=$(dirname "$(readlink -f "$0")")
[ "$(id -u)" = 0 ] || { echo "up.sh: needs root" >&2; exit 1; }
mkdir -p "$LAB"

# ---- packages (tried with Debian 12: slurm 22.05.8, munge 0.5.15, pmix 4.2.2)
PKGS=""
for c in slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge ip:iproute2; do
  command -v "${c%%:*}" >/dev/null || PKGS="$PKGS ${c##*:}"
done
PMIXLIB=/usr/lib/$(uname -m)-linux-gnu/pmix2/lib
[ -e "$PMIXLIB/libpmix.so.2" ] || PKGS="$PKGS libpmix2"
if [ -n "$PKGS" ]; then
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086  # a list of words
  inst() { apt-get install -y -q --no-install-recommends $PKGS >"$LAB/apt.log" 2>&1; }
  inst || { apt-get update -q >/dev/null; inst; }
fi
# Slurm's mpi/pmix opens libpmix.so by its full path; only libpmix-dev, with much behind it, has that link
[ -e "$PMIXLIB/libpmix.so" ] || ln -sfn libpmix.so.2 "$PMIXLIB/libpmix.so"

LAB=$LAB BR=$BR "$HERE/down.sh" quiet || true
rm -rf "$LAB/state" "$LAB/run" "$LAB/tmp"
mkdir -p "$LAB"/{etc/over,run,log,state/ctld}
chmod 755 "$LAB" "$LAB"/{etc,run,log,state}

HOST=$(hostname -s)
if [ "$N" = 1 ]; then NODES=n1; IDX=1; PORTS=$((NODEPORT0+1))
else NODES="n[1-$N]"; IDX="[1-$N]"; PORTS="[$((NODEPORT0+1))-$((NODEPORT0+N))]"; fi
case $MODE in
  net) CTLADDR=$NETPFX.254; NADDR="NodeHostname=$NODES NodeAddr=$NETPFX.$IDX Port=$NODEPORT0";;
  uts) CTLADDR=127.0.0.1;   NADDR="NodeHostname=$NODES NodeAddr=127.0.0.1 Port=$PORTS";;
  *) echo "up.sh: MODE is net or uts, not $MODE" >&2; exit 1;;
esac

# GPUs are files that jobs may open; their numbers reach CUDA_VISIBLE_DEVICES as real ones' do
mkdir -p "$LAB/dev"; : > "$LAB/etc/gres.conf"; GRES=""
if [ "$GPUS" -gt 0 ]; then
  for i in $(seq 0 $((GPUS-1))); do rm -f "$LAB/dev/nvidia$i"; mknod -m 666 "$LAB/dev/nvidia$i" c 1 3; done
  FILES=nvidia0; [ "$GPUS" -gt 1 ] && FILES="nvidia[0-$((GPUS-1))]"
  echo "AutoDetect=off
NodeName=$NODES Name=gpu Type=$GPUTYPE File=$LAB/dev/$FILES" > "$LAB/etc/gres.conf"
  GRES="Gres=gpu:$GPUTYPE:$GPUS"
fi

cat > "$LAB/etc/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$HOST($CTLADDR)
SlurmctldPort=$CTLPORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$LAB/run/munge.sock,cred_expire=10
CredType=cred/munge
StateSaveLocation=$LAB/state/ctld
SlurmdSpoolDir=$LAB/state/slurmd.%n
# per host: mpi/pmix makes spmix_appdir_* here, and a second host of this machine would collide
TmpFS=$LAB/tmp/%n
SlurmctldPidFile=$LAB/run/slurmctld.pid
SlurmdPidFile=$LAB/run/slurmd.%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
MailProg=/bin/true
# no control groups, no systemd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# more CPUs than the machine has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=1
SlurmctldTimeout=30
SlurmdTimeout=20
KillWait=5
InactiveLimit=0
MpiDefault=${MPI_DEFAULT:-none}
PropagateResourceLimitsExcept=MEMLOCK
GresTypes=gpu
NodeName=$NODES $NADDR Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=256000 $GRES ${FEATURES:+Feature=$FEATURES} State=UNKNOWN
PartitionName=debug Nodes=$NODES Default=YES DefaultTime=10 MaxTime=INFINITE State=UP
$(for p in $PARTITIONS; do echo "PartitionName=$p Nodes=$NODES DefaultTime=10 MaxTime=INFINITE State=UP"; done)
CONF

export SLURM_CONF="$LAB/etc/slurm.conf"
cat > "$LAB/env.sh" <<ENV
export SLURM_CONF=$SLURM_CONF
# Open MPI's mpirun binds to cores and refuses (code 213) more ranks per host than this machine has cores
export PRTE_MCA_hwloc_default_binding_policy=none
ENV
[ -s "$LAB/etc/munge.key" ] || (umask 077; head -c 128 /dev/urandom > "$LAB/etc/munge.key")

# ---- network
if [ "$MODE" = net ]; then
  ip link show "$BR" >/dev/null 2>&1 || ip link add "$BR" type bridge
  ip addr replace "$NETPFX.254/24" dev "$BR"; ip link set "$BR" up
  for i in $(seq 1 "$N"); do
    ip netns add "$BR-n$i"
    ip link add "$BR-v$i" type veth peer name eth0 netns "$BR-n$i"
    ip link set "$BR-v$i" master "$BR" up
    ip -n "$BR-n$i" addr add "$NETPFX.$i/24" dev eth0
    ip -n "$BR-n$i" link set eth0 up; ip -n "$BR-n$i" link set lo up
    ip -n "$BR-n$i" route add default via "$NETPFX.254"
    if [ -n "${RATE:-}" ]; then
      ip netns exec "$BR-n$i" tc qdisc add dev eth0 root tbf rate "$RATE" burst 256kb latency 50ms
      tc qdisc add dev "$BR-v$i" root tbf rate "$RATE" burst 256kb latency 50ms
    fi
  done
fi
{ echo "127.0.0.1 localhost"
  echo "$CTLADDR $HOST"
  for i in $(seq 1 "$N"); do if [ "$MODE" = net ]; then echo "$NETPFX.$i n$i"; else echo "127.0.0.1 n$i"; fi; done
} > "$LAB/etc/over/hosts"

# ---- daemons, with a clean environment: it is what a job submitted with --export=NONE sees
CLEAN="env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin SLURM_CONF=$SLURM_CONF"
$CLEAN munged --key-file="$LAB/etc/munge.key" --socket="$LAB/run/munge.sock" --pid-file="$LAB/run/munged.pid" \
       --log-file="$LAB/log/munged.log" --seed-file="$LAB/run/munged.seed"
$CLEAN slurmctld
cat > "$LAB/run/node.sh" <<NODE
#!/bin/sh
# node.sh nX: start one host, or start it again after it was killed
mkdir -p -m 1777 $LAB/tmp/\$1
IN=""; [ $MODE = net ] && IN="nsenter --net=/run/netns/$BR-\$1"
exec \$IN unshare --uts --mount --ipc sh -ec "hostname \$1
 # a read-only overlay on /etc, not a bind on the file: a rename of the machine's /etc/hosts would undo a bind
 mount -t overlay overlay -o lowerdir=$LAB/etc/over:/etc /etc 2>/dev/null || mount --bind $LAB/etc/over/hosts /etc/hosts
 mount -t tmpfs tmpfs /dev/shm
 exec $CLEAN slurmd -N \$1"
NODE
chmod +x "$LAB/run/node.sh"
for i in $(seq 1 "$N"); do "$LAB/run/node.sh" "n$i"; done

idle() { sinfo -h -N -o '%N %t' 2>/dev/null | sort -u | grep -c ' idle$' || true; }
for _ in $(seq 1 150); do [ "$(idle)" = "$N" ] && break; sleep 0.1; done
echo "MODE=$MODE  (source $LAB/env.sh)"
sinfo -o '%P %.5a %.6D %.8t %N %C'
[ "$(idle)" = "$N" ] || { echo "up.sh: not all hosts are idle; see $LAB/log" >&2; exit 1; }
