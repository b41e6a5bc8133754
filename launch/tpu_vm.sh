#!/usr/bin/env bash
# Trains on a Cloud TPU slice: see --help and docs/launch-tpu-vm.md.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/tpu_vm.sh --name=NAME --zone=ZONE --accelerator_type=TYPE [OPTION ...] -- COMMAND ...

Asks for a Cloud TPU slice, runs COMMAND on every worker of it, shows worker 0's log and deletes
the slice at the end: also after a failure and after Ctrl-C. A slice that is preempted is asked for
again. COMMAND must hold --workdir=gs://..., from which it resumes.

  --name=NAME              what the slice is called in the project
  --zone=ZONE              such as us-west4-a
  --accelerator_type=TYPE  such as v5litepod-16
  --runtime_version=NAME   the image of the machines; default: by TYPE
  --project=PROJECT        default: gcloud's own
  --spot                   a preemptible slice, for less
  --source=SOURCE          what to train with: the folder of a git repository, whose tracked files
                           are sent as they are; or URL or URL#REF of one. Default: this repository
  --install=COMMAND        what installs it; default: a Python 3.12 environment with '.[tpu,gcs]'
  --max_restarts=N         restarts after crashes before the run is given up; default: 3
  --create_flag=FLAG       a further flag of 'gcloud compute tpus queued-resources create', such as
                           --service-account=NAME; may be given several times
  --poll=SECONDS           between two looks at the slice; default: 15
  --patience=SECONDS       for the first sign of life of a slice that is up; default: 1800
  --keep                   leave the slice at the end; it goes on costing

Exit code: that of COMMAND. 42 (preempted) and crashes are run again; 0, 2, 3 and 130 are final.
TEXT
}

say() { echo "tpu_vm: $*" >&2; }
refuse() { say "error: $*; see --help" && exit 2; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name='' zone='' accelerator_type='' runtime_version='' source=$(dirname "$here") keep=false
install="python3 -m pip install --quiet uv && python3 -m uv venv --quiet --python=3.12 &&
  python3 -m uv pip install --quiet -e '.[tpu,gcs]'"
max_restarts=3 poll=15 patience=1800 create_flags=(--quiet) project=()
while (($#)); do
  case $1 in
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --accelerator_type=*) accelerator_type=${1#*=} ;;
    --runtime_version=*) runtime_version=${1#*=} ;;
    --project=*) project=("$1") ;;
    --spot) create_flags+=(--spot) ;;
    --source=*) source=${1#*=} ;;
    --install=*) install=${1#*=} ;;
    --max_restarts=*) max_restarts=${1#*=} ;;
    --create_flag=*) create_flags+=("${1#*=}") ;;
    --poll=*) poll=${1#*=} ;;
    --patience=*) patience=${1#*=} ;;
    --keep) keep=true ;;
    --help | -h) usage && exit 0 ;;
    --) shift && break ;;
    *) refuse "unknown option $1" ;;
  esac
  shift
done

workdir=''
for argument; do [[ $argument != --workdir=* ]] || workdir=${argument#*=}; done
[[ -n $name && -n $zone && -n $accelerator_type ]] ||
  refuse "--name, --zone and --accelerator_type are needed"
[[ $workdir == gs://* ]] ||
  refuse "the command needs --workdir=gs://BUCKET/..., which all workers reach; it has '$workdir'"
[[ -d $source || $source == *://* ]] || refuse "--source=$source is neither a folder nor a URL"
case ${runtime_version:-$accelerator_type} in
  "$runtime_version") ;;
  v5litepod-*) runtime_version=v2-alpha-tpuv5-lite ;;
  v5p-*) runtime_version=v2-alpha-tpuv5 ;;
  v6e-*) runtime_version=v2-alpha-tpuv6e ;;
  *) runtime_version=tpu-ubuntu2204-base ;;
esac
where=(--zone="$zone" ${project[@]+"${project[@]}"})
tpus() { gcloud compute tpus "$@" "${where[@]}"; }

files=$(mktemp -d)
# Beside the workdir, not in it: what is in there is the run's own.
launches=${workdir%/}.launch/$(date -u +%Y%m%d-%H%M%S)
ours=false logs=''
# shellcheck disable=SC2329 # trap calls it
finish() {
  local code=$?
  trap '' HUP INT TERM # a second Ctrl-C must not leave the slice behind
  stop_logs
  if $ours && $keep; then
    say "kept, and costing: gcloud compute tpus queued-resources delete $name --force ${where[*]}"
  elif $ours; then
    delete || code=1
  fi
  rm -rf "$files"
  exit "$code"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

delete() {
  say "deleting $name"
  for _ in 1 2 3; do
    ! tpus queued-resources delete "$name" --force --quiet || return 0
    sleep "$poll"
  done
  say "error: $name COULD NOT BE DELETED and may go on costing. Run:
  gcloud compute tpus queued-resources delete $name --force ${where[*]}"
  return 1
}

state() { tpus queued-resources describe "$name" --format='value(state.state)'; }

start() { # writes what a worker starts and stops with, and asks for the slice
  {
    printf '#!/usr/bin/env bash\nlaunch=%q\nsource=%q\ninstall=%q\n' "$launch" "$source" "$install"
    printf 'max_restarts=%q\npoll=%q\ncommand=(' "$max_restarts" "$poll"
    printf '%q ' "$@"
    printf ')\n'
    cat "$here/tpu_worker.sh"
  } >"$files/start-up"
  cat >"$files/shut-down" <<'SCRIPT'
#!/usr/bin/env bash
pid=$(cat "${PODRACER_HOME:-/var/lib/podracer}/pid") && kill -TERM "$pid"
while kill -0 "$pid" 2>/dev/null; do sleep 0.5; done
SCRIPT
  say "asking for $name, $accelerator_type in $zone"
  ours=true
  tpus queued-resources create "$name" --node-id="$name" --accelerator-type="$accelerator_type" \
    --runtime-version="$runtime_version" "${create_flags[@]}" \
    --metadata-from-file="startup-script=$files/start-up,shutdown-script=$files/shut-down"
}

follow() { # shows worker 0's log; a connection that breaks is made again
  local lines=+1
  while true; do
    tpus tpu-vm ssh "$name" --worker=0 --quiet --command="tail -n $lines -F /var/lib/podracer/log" ||
      say "no connection to the log yet"
    lines=20
    sleep "$poll"
  done
}

start_logs() {
  set -m # a process group of its own, so that ssh ends with it
  follow </dev/null &
  logs=$!
  set +m
}

stop_logs() {
  [[ -z $logs ]] || kill -- "-$logs" || true
  logs=''
}

watch() { # sets code to the command's, or to nothing if the slice was taken away
  local now last='' deadline
  while true; do
    code=$(gcloud storage cat "$launch/*.exit" 2>/dev/null | head -n 1) || true
    [[ -z $code ]] || return 0
    now=$(state) || now=$last # one failed look says nothing
    [[ $now == "$last" ]] || say "$name is ${now:-unknown}"
    case $now in
      SUSPENDED) return 0 ;;
      FAILED) say "error: the request failed; look at: gcloud compute tpus queued-resources describe \
$name ${where[*]}" && exit 1 ;;
      ACTIVE)
        [[ -n $logs ]] || { start_logs && deadline=$((SECONDS + patience)); }
        ((SECONDS < deadline)) || gcloud storage ls "$launch/*.log" >/dev/null || {
          say "error: no worker wrote to $launch; may the slice's service account write there?"
          exit 1
        }
        ;;
    esac
    last=$now
    sleep "$poll"
  done
}

! state >/dev/null 2>&1 || refuse "$name exists already in $zone"
if [[ -d $source ]]; then
  # What is tracked, with changes not yet committed.
  commit=$(git -C "$source" stash create)
  git -C "$source" archive --format=tar.gz --output="$files/source.tar.gz" "${commit:-HEAD}"
  gcloud storage cp --quiet "$files/source.tar.gz" "$launches/source.tar.gz"
  source=$launches/source.tar.gz
fi
for ((slice = 0; ; slice++)); do
  launch=$launches/slice-$slice code=''
  start "$@"
  watch
  [[ -z $code ]] || break
  say "$name was preempted; asking for it again"
  stop_logs
  delete || exit 1
done
sleep "$poll" # the log's last lines are still on their way
say "exit code $code; logs of all workers: $launch"
((code == 0)) || gcloud storage cat "$launch/*.log" | tail -n 50 >&2
exit "$code"
