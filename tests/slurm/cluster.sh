#!/bin/bash
# A real Slurm on this one machine, for tests: a controller and two nodes n1 and n2, each with pretended GPUs.
# No systemd, no cgroups, nothing that listens beyond the loopback, nothing of an installed Slurm's own setup.
#
#   cluster.sh install                   Debian's packages, where they are missing
#   cluster.sh start | stop | status
#   cluster.sh start-controller | stop-controller | restart-controller
#   cluster.sh fail-node NODE            as if its power went: every process of it is killed, the controller told
#   cluster.sh restore-node NODE
#   cluster.sh processes [NODE]          pids of what jobs run there
#
# Environment:
#   BASE         directory of the cluster's state; short, and every parent open to all (munge insists)
#   PORT_OFFSET  added to the ports 26817 to 26821, so that a second cluster can run beside (0)
#   GPUS, CPUS   of each node, pretended (8, 64)
#   GRACE        seconds that a preempted job of the partition debug is left (20)
# Clients need SLURM_CONF=$BASE/slurm.conf.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

PACKAGES=(slurm-wlm munge slurmdbd slurm-wlm-mysql-plugin mariadb-server-core mariadb-client-core)
NODES=(n1 n2)
BASE=${BASE:-/tmp/overlap_sweep_slurm}
PORT=$((26817 + ${PORT_OFFSET:-0}))
GPUS=${GPUS:-8}
CPUS=${CPUS:-64}
GRACE=${GRACE:-20}
HOST=${HOSTNAME%%.*}
MUNGE=$BASE/munge
export SLURM_CONF=$BASE/slurm.conf

die() { echo "$*" >&2; exit 1; }

# wait_until SECONDS WHAT COMMAND...
wait_until() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            tail -n 20 "$BASE"/log/*.log >&2 || true
            die "Slurm in $BASE: $what did not come about; the logs end as above"
        fi
        sleep 0.1
    done
}

# --- processes -------------------------------------------------------------------------------------------------------

pid_file() {
    case $1 in
        munged) echo "$MUNGE/munged.pid" ;;
        mariadbd) echo "$BASE/db/mariadbd.pid" ;;
        *) echo "$BASE/$1.pid" ;;
    esac
}

# The name is compared because a recorded pid may be another process's by now. A zombie has ended: the process that
# should fetch it, the machine's first, may take its time.
running() {
    local pid status
    pid=$(cat "$(pid_file "$1")" 2>/dev/null) && [ -n "$pid" ] || return 1
    status=$(cat "/proc/$pid/status" 2>/dev/null) || return 1
    [[ $status == "Name:"$'\t'"${1%%.*}"$'\n'* && $status != *"State:"$'\t'"Z"* ]]
}

# end DAEMON [SIGNAL]
end() {
    running "$1" || return 0
    kill "-${2:-TERM}" "$(cat "$(pid_file "$1")")" 2>/dev/null || true
    for _ in {1..100}; do
        running "$1" || return 0
        sleep 0.1
    done
    kill -KILL "$(cat "$(pid_file "$1")")" 2>/dev/null || true
}

# Jobs' processes are told by their environment, whatever session or parent they have by now.
job_processes() {
    local node=${1:-n}
    { grep -lzsxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ || true; } |
        { xargs -r grep -lzs "^SLURMD_NODENAME=$node" || true; } | cut -d/ -f3
}

# slurmstepd starts without its node's name, but it writes into the node's log.
step_daemons() {
    local pid log
    log=$(realpath -m "$BASE")/log/slurmd.${1:-}
    for pid in $(grep -lsxF slurmstepd /proc/[0-9]*/comm | cut -d/ -f3); do
        readlink "/proc/$pid/fd/"* 2>/dev/null | grep -qF "$log" && echo "$pid"
    done
    return 0
}

# Several rounds: a process may fork while the list is made.
kill_jobs() {
    local pids
    for _ in {1..20}; do
        pids=$(step_daemons "${1:-}"; job_processes "${1:-}")
        [ -n "$pids" ] || return 0
        # shellcheck disable=SC2086
        kill -KILL $pids 2>/dev/null || true
        sleep 0.1
    done
    die "processes of jobs outlive SIGKILL: $pids"
}

# --- configuration ---------------------------------------------------------------------------------------------------

make_directories() {
    # The longest path of a Unix socket in here is BASE/spool.n1/n1_JOBID.STEP; the kernel ends them at 107 bytes.
    [ ${#BASE} -le 60 ] || die "BASE is too long for the Unix sockets in it: $BASE"
    mkdir -p "$BASE"/{state,spool.n1,spool.n2,log,dev,munge}
    chmod 755 "$BASE" "$MUNGE"
    chown munge:munge "$MUNGE"
    # Slurm demands device files; nobody opens them, so copies of /dev/null will do.
    local i
    for ((i = 0; i < GPUS; i++)); do
        [ -c "$BASE/dev/gpu$i" ] || mknod "$BASE/dev/gpu$i" c 1 3
    done
}

# A requeued job begins again only when its old credential has expired, hence the short cred_expire.
write_slurm_conf() {
    local node="CPUS=$CPUS RealMemory=16000 Gres=gpu:$GPUS State=UNKNOWN"
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$MUNGE/socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$BASE/state
SlurmdSpoolDir=$BASE/spool.%n
SlurmctldPidFile=$BASE/slurmctld.pid
SlurmdPidFile=$BASE/slurmd.%n.pid
SlurmctldLogFile=$BASE/log/slurmctld.log
SlurmdLogFile=$BASE/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT + 3))
AccountingStoragePass=$MUNGE/socket
AccountingStorageTRES=gres/gpu
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=2
MinJobAge=300
InactiveLimit=0
SlurmctldTimeout=60
SlurmdTimeout=60
MailProg=/bin/true
NodeName=n1 NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$((PORT + 1)) $node
NodeName=n2 NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$((PORT + 2)) $node
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=$GRACE
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
CONF
    echo "NodeName=n[1-2] Name=gpu File=$BASE/dev/gpu[0-$((GPUS - 1))]" >"$BASE/gres.conf"
}

# slurmdbd refuses a configuration that others can read.
write_slurmdbd_conf() {
    (umask 077 && cat >"$BASE/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$MUNGE/socket
DbdHost=$HOST
DbdAddr=127.0.0.1
DbdPort=$((PORT + 3))
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
LogFile=$BASE/log/slurmdbd.log
PidFile=$BASE/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((PORT + 4))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
CONF
    )
}

# --- daemons ---------------------------------------------------------------------------------------------------------

start_munge() {
    running munged && return
    (umask 077 && head -c 128 /dev/urandom >"$MUNGE/key")
    chown munge:munge "$MUNGE/key"
    setpriv --reuid munge --regid munge --clear-groups munged --socket="$MUNGE/socket" --key-file="$MUNGE/key" \
        --pid-file="$(pid_file munged)" --log-file="$MUNGE/munged.log" --seed-file="$MUNGE/seed"
    wait_until 10 "munge's credential" eval "munge -S '$MUNGE/socket' -n | unmunge -S '$MUNGE/socket'"
}

sql() { mariadb --no-defaults -uroot -S "$BASE/db/socket" -e "$1"; }

start_database() {
    running mariadbd && return
    # Its own, because a server that starts removes the temporary tables of all others in the same directory.
    local -x TMPDIR=$BASE/db/tmp
    mkdir -p "$TMPDIR"
    [ -d "$BASE/db/data/mysql" ] || mariadb-install-db --no-defaults --user=root --datadir="$BASE/db/data" \
        --auth-root-authentication-method=normal --skip-test-db >"$BASE/log/mariadb_install.log" 2>&1 ||
        die "the database could not be made: $(head -n 20 "$BASE/log/mariadb_install.log")"
    setsid mariadbd --no-defaults --user=root --datadir="$BASE/db/data" --socket="$BASE/db/socket" \
        --pid-file="$(pid_file mariadbd)" --bind-address=127.0.0.1 --port=$((PORT + 4)) \
        --innodb-buffer-pool-size=64M >"$BASE/log/mariadbd.log" 2>&1 </dev/null &
    wait_until 30 "the database" sql "select 1"
    sql "create database if not exists slurm_acct_db;
         create user if not exists 'slurm'@'localhost' identified by 'slurm';
         create user if not exists 'slurm'@'127.0.0.1' identified by 'slurm';
         grant all on slurm_acct_db.* to 'slurm'@'localhost';
         grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1';"
}

start_accounting() {
    start_database
    write_slurmdbd_conf
    running slurmdbd || slurmdbd
    wait_until 30 "slurmdbd's answer" sacctmgr -n list cluster
    [ -n "$(sacctmgr -n list cluster format=cluster)" ] || sacctmgr -i add cluster test >/dev/null
}

start_controller() {
    running slurmctld || slurmctld -f "$SLURM_CONF"
    wait_until 30 "the controller's answer" sinfo -h
    wait_until 10 "the controller's pid file" running slurmctld
}

start_node() {
    running "slurmd.$1" || slurmd -f "$SLURM_CONF" -N "$1"
    wait_until 10 "the pid file of $1" running "slurmd.$1"
}

# Exactly idle or in use: a state with a mark, such as "idle*" for a node that does not answer yet, is not up.
node_is_up() { [[ $(sinfo -h -N -n "$1" -o %T | sort -u) =~ ^(idle|mixed|allocated)$ ]]; }

# --- commands --------------------------------------------------------------------------------------------------------

install_packages() {
    local log
    all_there && return
    [ "$EUID" = 0 ] || die "Slurm is missing, and only root can install it: apt-get install ${PACKAGES[*]}"
    command -v apt-get >/dev/null || die "Slurm is missing, and there is no apt-get to install it"
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    if ! { apt-get -q update && apt-get -q install -y --no-install-recommends "${PACKAGES[@]}"; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        die "Slurm could not be installed"
    fi
    rm -f "$log"
    all_there || die "apt-get installed ${PACKAGES[*]}, and yet a program is missing"
}

all_there() {
    local program
    for program in sbatch slurmctld slurmd munged slurmdbd mariadbd mariadb mariadb-install-db; do
        command -v "$program" >/dev/null || return 1
    done
}

start() {
    [ "$EUID" = 0 ] || die "only root can start a Slurm of several nodes on one machine"
    make_directories
    write_slurm_conf
    start_munge
    start_accounting
    start_controller
    for node in "${NODES[@]}"; do start_node "$node"; done
    for node in "${NODES[@]}"; do wait_until 30 "node $node" node_is_up "$node"; done
}

# The daemons before the jobs, so that nobody starts a new one.
stop() {
    end slurmctld
    for node in "${NODES[@]}"; do end "slurmd.$node"; done
    kill_jobs
    for daemon in slurmdbd mariadbd munged; do end "$daemon"; done
}

status() {
    local daemon
    for daemon in munged mariadbd slurmdbd slurmctld "${NODES[@]/#/slurmd.}"; do
        if running "$daemon"; then echo "$daemon $(cat "$(pid_file "$daemon")")"; else echo "$daemon down"; fi
    done
    if running slurmctld; then sinfo -N -l; squeue -a; fi
}

fail_node() {
    end "slurmd.$1" KILL
    kill_jobs "$1"
    scontrol update "nodename=$1" state=down reason="its power went"
}

restore_node() {
    start_node "$1"
    # Refused when the node has come back by itself.
    scontrol update "nodename=$1" state=resume 2>/dev/null || true
    wait_until 60 "node $1" node_is_up "$1"
}

case "${1:-}" in
    install) install_packages ;;
    start | stop | status) "$1" ;;
    start-controller) start_controller ;;
    stop-controller) end slurmctld ;;
    restart-controller) end slurmctld; start_controller ;;
    fail-node) fail_node "$2" ;;
    restore-node) restore_node "$2" ;;
    processes) job_processes "${2:-}" ;;
    *) sed -n '2,/^set /{/^#/p}' "$0" >&2; exit 2 ;;
esac
