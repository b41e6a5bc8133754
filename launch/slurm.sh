#!/usr/bin/env bash
# Trains on the nodes of a SLURM job: see --help and docs/launch-slurm.md.
#SBATCH --job-name=podracer
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: sbatch [OPTION ...] launch/slurm.sh COMMAND ...

Runs COMMAND once on every node of the job; JAX finds the other processes by SLURM's variables.
Options of sbatch override the #SBATCH lines of this file, for example --nodes=4 --gpus-per-node=8
--cpus-per-task=32 --time=48:00:00. Without --cpus-per-task SLURM allocates one CPU core per node.
COMMAND needs a --workdir that all nodes can reach, from which it resumes when the job is requeued.

SLURM sends SIGTERM to the trainers 300 seconds before the time limit (--signal=TERM@300); they save
and end with code 42, and the job is requeued. Codes 0, 2, 3, 7 and 130 are final. After all others
the job is requeued at most MAX_RESTARTS times, an environment variable; default: 3.
The exit codes of all processes are kept in slurm-JOB.codes/.
TEXT
}

if (($# == 0)) || [[ $1 == --help || $1 == -h ]]; then usage && exit 0; fi
: "${SLURM_JOB_ID:?is not set: submit this script with sbatch}"

folder=$PWD/slurm-$SLURM_JOB_ID.codes
codes=$folder/${SLURM_RESTART_COUNT:-0}
mkdir -p "$codes"

# By default JAX uses one GPU per process on SLURM; here a process uses all GPUs of its node.
if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then
  JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
  export JAX_LOCAL_DEVICE_IDS
fi
# Since SLURM 22.05 srun ignores the --cpus-per-task of sbatch, except by this variable.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}
fi

# SIGTERM reaches the shell of each task as well, which must wait for its trainer. This script itself
# must not trap it: scancel sends it here, and then the job must not be requeued.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=0 bash -c '
  trap : TERM
  code=0 && "$@" || code=$?
  echo "$code" >"$0/$SLURM_PROCID"
  exit "$code"' "$codes" "$@" || echo "srun ended with exit code $?"

all=$(cat "$codes"/[0-9]* || true)
(($(wc -w <<<"$all") >= SLURM_NTASKS)) || all+=$'\n1' # a task was lost with its node: a crash
if final=$(grep -m1 -xE '2|3|7|130' <<<"$all"); then
  exit "$final" # a restart would not help
elif crash=$(grep -m1 -vxE '0|42' <<<"$all"); then
  echo "$codes" >>"$folder/crashes"
  (($(wc -l <"$folder/crashes") <= ${MAX_RESTARTS:-3})) || exit "$crash"
elif ! grep -qx 42 <<<"$all"; then
  exit 0 # done
fi
echo "requeueing the job, to resume the run"
scontrol requeue "$SLURM_JOB_ID"
