#!/usr/bin/env bash
# Trains on the first component of a heterogeneous SLURM job and steps environments on the second:
# see --help and docs/launch-workers.md.
#SBATCH --job-name=podracer
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: sbatch [OPTION ...] : [OPTION ...] launch/slurm_workers.sh [WORKER_FLAG ...] -- COMMAND ...

Runs COMMAND, a learner, once on every node of the first component of the job, and a worker with
WORKER_FLAGs such as --num_envs=64 on every node of the second one. Submit it from the folder that
contains launch/. The options before the colon are of the first component, those after it of the
second, for example --nodes=1 --gpus-per-node=4 --cpus-per-task=32 : --nodes=8 --cpus-per-task=64.
--time and --signal need not be repeated.

COMMAND needs --config.remote.num_envs, and a --workdir that the nodes of the learner can reach. The
address, a token and a certificate are generated for the job and added to COMMAND and to the workers'
flags. They are in slurm-JOB.remote/, where more workers can find them while the job runs.

Exit codes and requeueing are as described by launch/slurm.sh --help. A worker that fails is started
again; when the learner wants none of them (code 2), the job is cancelled. The learner's port is the
environment variable PORT; default: 20000 and the last four digits of the job's number.
TEXT
}

if (($# == 0)) || [[ $1 == --help || $1 == -h ]]; then usage && exit 0; fi
reject() { echo "error: $*; see --help"$'\n''See docs/launch-workers.md#messages' >&2 && exit 2; }
: "${SLURM_JOB_ID:?is not set: submit this script with sbatch}"
[[ ${SLURM_HET_SIZE:-} == 2 ]] || reject "the job must have two components"
[[ -f launch/slurm.sh ]] || reject "submit this script from the folder that contains launch/"
flags=()
while (($#)) && [[ $1 != -- ]]; do flags+=("$1") && shift; done
(($# > 1)) || reject "'-- COMMAND ...' is missing"
shift

names=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
mapfile -t hosts <<<"$names"
port=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
connect=$(printf "%s:$port," "${hosts[@]}")
alternatives=$(printf 'DNS:%s,' "${hosts[@]}")
folder=$PWD/slurm-$SLURM_JOB_ID.remote

# Nobody else may read these. A requeued job has other hosts, and thus another certificate.
(
  umask 077
  rm -rf "$folder" && mkdir "$folder"
  openssl rand -hex 32 >"$folder/token"
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 \
    -subj /CN=podracer -addext "subjectAltName=${alternatives%,}" \
    -keyout "$folder/learner.key" -out "$folder/learner.crt" 2>"$folder/openssl.log"
  echo "${connect%,}" >"$folder/connect"
)

run_workers() {
  # srun reads these as its options; they are of the first component.
  unset "${!SLURM_GPU@}" "${!SLURM_NTASKS@}" SLURM_NPROCS SLURM_GRES "${!SLURM_TRES@}" \
    SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
  # Clusters set a proxy for downloads, through which gRPC would also try to reach the learner.
  no_grpc_proxy=$(IFS=, && echo "${hosts[*]}")
  export no_grpc_proxy
  local nodes=$SLURM_JOB_NUM_NODES_HET_GROUP_1
  # shellcheck disable=SC2016
  srun --het-group=1 --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
    --cpus-per-task="${SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1%%[^0-9]*}" \
    --kill-on-bad-exit=0 --no-kill bash -c '
    while true; do
      code=0 && "$@" || code=$?
      [[ $code != [02] ]] || break # the run is over, or this worker is not wanted
      echo "worker $SLURM_PROCID: exit code $code, starts again" && sleep 5
    done
    echo "$code" >"$0/worker-$SLURM_PROCID"
    exit "$code"' "$folder" python -m podracer.worker --connect="${connect%,}" \
    --token_file="$folder/token" --tls_ca="$folder/learner.crt" ${flags[@]+"${flags[@]}"} || true
  # Their files hold the exit codes, of which srun returns only one. Without workers the learner would
  # wait until the time limit.
  if [[ $(cat "$folder"/worker-* 2>/dev/null | sort | uniq -c | tr -s ' ') == " $nodes 2" ]]; then
    echo "the learner wants none of the workers: cancelling the job"
    scancel "$SLURM_JOB_ID"
  fi
}
run_workers &

# In place of this script, because scancel must reach it. The workers are still running when it ends:
# SLURM ends them with the job.
export SLURM_NTASKS=${#hosts[@]}
# sbatch sets no SLURM_CPUS_PER_TASK in a heterogeneous job, and srun would allocate a single CPU.
export SRUN_CPUS_PER_TASK=${SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0%%[^0-9]*}
exec bash launch/slurm.sh "$@" --config.remote.listen="0.0.0.0:$port" \
  --config.remote.token_file="$folder/token" \
  --config.remote.tls_cert="$folder/learner.crt" --config.remote.tls_key="$folder/learner.key"
