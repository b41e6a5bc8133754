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

Runs COMMAND once on every node of the job; JAX finds the other processes by SLURM's variables. Options
of sbatch win over the #SBATCH lines of this file: --nodes=4 --gpus-per-node=8 --time=48:00:00.
COMMAND needs a --workdir that all nodes reach; from it a requeued job resumes.

The trainers get SIGTERM 300 seconds ahead of the time limit (--signal=TERM@300), save and end with
code 42. That and crashes put the job back into the queue; 0, 2, 3 and 130 are final. MAX_RESTARTS,
an environment variable, says after how many crashes the job is given up; default: 3.
The exit codes of all processes stay in slurm-JOB.codes/.
TEXT
}

if (($# == 0)) || [[ $1 == --help || $1 == -h ]]; then usage && exit 0; fi
: "${SLURM_JOB_ID:?is not set: submit this script by sbatch}"

folder=$PWD/slurm-$SLURM_JOB_ID.codes
codes=$folder/${SLURM_RESTART_COUNT:-0}
mkdir -p "$codes"

# With SLURM's variables JAX takes one GPU a process; here a process has all of its node.
if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then
  JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
  export JAX_LOCAL_DEVICE_IDS
fi

# SIGTERM reaches the shell of each task too, which must wait for its trainer. This script itself
# must not trap it: scancel sends it here, and nothing is to be requeued then.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=0 bash -c '
  trap : TERM
  code=0 && "$@" || code=$?
  echo "$code" >"$0/$SLURM_PROCID"
  exit "$code"' "$codes" "$@" || echo "srun ended with exit code $?"

all=$(cat "$codes"/[0-9]* || true)
(($(wc -w <<<"$all") >= SLURM_NTASKS)) || all+=$'\n1' # one ended with its node
if final=$(grep -m1 -xE '2|3|130' <<<"$all"); then
  exit "$final" # no restart helps
elif crash=$(grep -m1 -vxE '0|42' <<<"$all"); then
  echo "$codes" >>"$folder/crashes"
  (($(wc -l <"$folder/crashes") <= ${MAX_RESTARTS:-3})) || exit "$crash"
elif ! grep -qx 42 <<<"$all"; then
  exit 0 # done
fi
echo "back into the queue, to resume"
scontrol requeue "$SLURM_JOB_ID"
