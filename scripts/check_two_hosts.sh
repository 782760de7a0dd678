#!/usr/bin/env bash
# Ranks on two hosts, tried on one machine: two network namespaces with names of their own, joined by a cable, so that
# nothing but TCP is between them. By hand, as root, with the packages iproute2 and openmpi-bin:
#   scripts/check_two_hosts.sh [PROGRAM [KEY=VALUE...]]        # build/biomoe
#   scripts/check_two_hosts.sh build/biomoe device=cuda parallelism.share_gpus=true
# Training over both (started by mpirun, and by torchrun's variables) is that on one, sharded or not; a rank that is
# killed and a cable that is cut end the others within timeout_s, with a line that names the rank; the run goes on after.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

program="$(realpath "${1:-build/biomoe}")"
readonly program hosts=(biomoe-a biomoe-b) addresses=(10.231.7.1 10.231.7.2) timeout_s=10
work="$(mktemp -d)"

cleanup() {
  status=$?
  for host in "${hosts[@]}"; do
    ip netns pids "$host" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns delete "$host" 2>/dev/null || true
  done
  rm -rf "$work"
  if ((status != 0)); then echo "check_two_hosts: FAILED in: ${part:-set-up}" >&2; fi
  exit $status
}
trap cleanup EXIT

if ((EUID != 0)); then
  echo "check_two_hosts: making network namespaces needs root" >&2
  exit 2
fi
for tool in ip mpirun; do
  command -v "$tool" >/dev/null || { echo "check_two_hosts: $tool is not here" >&2; exit 2; }
done

for host in "${hosts[@]}"; do ip netns add "$host"; done
ip link add biomoe-va type veth peer name biomoe-vb
ip link set biomoe-va netns "${hosts[0]}"
ip link set biomoe-vb netns "${hosts[1]}"
ip -n "${hosts[0]}" addr add "${addresses[0]}/24" dev biomoe-va
ip -n "${hosts[1]}" addr add "${addresses[1]}/24" dev biomoe-vb
for host in "${hosts[@]}"; do ip -n "$host" link set lo up; done
cable() {
  ip -n "${hosts[0]}" link set biomoe-va "$1"
  ip -n "${hosts[1]}" link set biomoe-vb "$1"
}
cable up

# on HOST COMMAND...: there, with names for both.
cat >"$work/hosts" <<HOSTS
127.0.0.1 localhost
${addresses[0]} ${hosts[0]}
${addresses[1]} ${hosts[1]}
HOSTS
cat >"$work/on" <<ON
#!/usr/bin/env bash
host="\$1"; shift
exec ip netns exec "\$host" unshare --uts --mount bash -c \
  'hostname "\$1"; mount --bind $work/hosts /etc/hosts; shift; exec "\$@"' _ "\$host" "\$@"
ON
cat >"$work/agent" <<AGENT
#!/usr/bin/env bash
host="\$1"; shift
exec $work/on "\$host" bash -c "\$*"
AGENT
chmod +x "$work/on" "$work/agent"

config=(--config-name L0_sanity num_threads=1 "parallelism.timeout_s=$timeout_s" "${@:2}")
# logged COMMAND...: shows what it printed if it fails.
logged() { "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; return 1; }; }
# over_mpi RUN HOSTS ARGUMENTS...: four ranks of mpirun.
over_mpi() {
  logged "$work/on" "${hosts[0]}" env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    mpirun --mca plm_rsh_agent "$work/agent" --mca btl_tcp_if_include 10.231.7.0/24 \
    --mca oob_tcp_if_include 10.231.7.0/24 --bind-to none -np 4 --host "$2" "$program" train "${config[@]}" \
    parallelism.ep_size=2 "run_dir=$work/$1" "${@:3}"
}
both="${hosts[0]}:2,${hosts[1]}:2"
# losses RUN: one a step.
losses() { sed -n 's/.*"loss": *\([0-9.e+-]*\).*/\1/p' "$work/$1/metrics.jsonl"; }
same_as_one_host() {
  if [[ "$(losses "$1")" != "$(losses one)" || -z "$(losses one)" ]]; then
    echo "check_two_hosts: the losses of $1 are not those of one host:" >&2
    paste <(losses one) <(losses "$1") >&2
    return 1
  fi
  echo "passed: $part"
}

part="one host"
over_mpi one "${hosts[0]}:4"
part="two hosts, mpirun: the losses are those of one host"
over_mpi two "$both"
grep -q "2 on this host" "$work/log"
same_as_one_host two
part="two hosts, parameters sharded"
over_mpi sharded "$both" parallelism.shard_parameters=true
same_as_one_host sharded

# over_tcp RUN ARGUMENTS...: a rank a host, started by the variables that torchrun sets.
over_tcp() {
  local rank
  for rank in 0 1; do
    "$work/on" "${hosts[rank]}" env RANK=$rank WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR="${addresses[0]}" MASTER_PORT=29400 \
      "$program" train "${config[@]}" "run_dir=$work/$1" "${@:2}" >"$work/log$rank" 2>&1 &
  done
}
both_pass() {
  wait -n && wait -n || { cat "$work"/log[01] >&2; return 1; }
}
part="two hosts, torchrun's variables"
over_tcp torchrun
both_pass
grep -q "^PASS" "$work/log0"
echo "passed: $part"

# ends_in_time PID...: the ranks end by themselves with status 1 within timeout_s and some seconds.
ends_in_time() {
  local started=$SECONDS pid status
  for pid in "$@"; do
    status=0
    wait "$pid" || status=$?
    if ((status != 1)); then
      echo "check_two_hosts: a rank ended with status $status, expected 1" >&2
      return 1
    fi
  done
  if ((SECONDS - started > timeout_s + 5)); then
    echo "check_two_hosts: the ranks ended after $((SECONDS - started)) s" >&2
    return 1
  fi
}
long=(num_train_steps=100000 sanity_check=false checkpoint.save_every_n_steps=50)
wait_for_checkpoint() {
  local tries=0
  until compgen -G "$work/$1/checkpoints/step_*" >/dev/null; do
    sleep 0.2
    if ((++tries > 300)); then cat "$work"/log[01] >&2; return 1; fi
  done
}
part="a rank on the other host is killed"
over_tcp killed "${long[@]}"
first=$(jobs -p | head -n1)
wait_for_checkpoint killed
pkill -9 -f "run_dir=$work/killed num_train_steps" -n
ends_in_time "$first" || { cat "$work/log0" >&2; exit 1; }
grep -q "rank 0: .*rank 1" "$work/log0"
{ wait || true; } 2>/dev/null
echo "passed: $part ($(grep -m1 -o 'rank 0: .*' "$work/log0"))"

part="the cable is cut"
over_tcp cut "${long[@]}"
mapfile -t pids < <(jobs -p)
wait_for_checkpoint cut
cable down
ends_in_time "${pids[@]}" || { cat "$work"/log[01] >&2; exit 1; }
grep -q "rank 0: .*rank 1" "$work/log0"
grep -q "rank 1: .*rank 0" "$work/log1"
echo "passed: $part ($(grep -m1 -o 'rank 1: .*' "$work/log1"))"
cable up

part="the run goes on after that"
last=$(basename "$(ls -d "$work"/cut/checkpoints/step_* | sort -t_ -k2 -n | tail -n1)")
over_tcp cut sanity_check=false "num_train_steps=$((${last#step_} + 5))"
both_pass
grep -q "$last" "$work/log0"
echo "passed: $part (from $last)"
