#!/usr/bin/env bash
# Trains on a Cloud TPU slice: see --help and docs/launch-tpu-vm.md.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/tpu_vm.sh --name=NAME --zone=ZONE --accelerator_type=TYPE [OPTION ...] -- COMMAND ...

Requests a Cloud TPU slice, runs COMMAND on all of its workers, shows the log of worker 0 and deletes
the slice at the end, also after a failure and after Ctrl-C. A preempted slice is requested again.
COMMAND must contain --workdir=gs://..., from which it resumes.

Required:
  --name=NAME              name of the slice in the project
  --zone=ZONE              zone of the slice, such as us-west4-a
  --accelerator_type=TYPE  v2-N, v3-N, v4-N, v5litepod-N, v5p-N or v6e-N, such as v5litepod-16

The slice:
  --runtime_version=NAME   image of the workers; default: the one Google documents for TYPE
  --project=PROJECT        project of the slice; default: the project that gcloud is configured with
  --spot                   request a spot (preemptible) slice, which is cheaper
  --create_flag=FLAG       additional flag of 'gcloud compute tpus queued-resources create', such as
                           --service-account=NAME; can be repeated
  --self_delete            let worker 0 delete the slice when the run has ended, in case this launcher
                           has been killed; the slice's service account needs roles/tpu.admin
  --keep                   do not delete the slice at the end; it is billed until it is deleted
  --dry_run                only check these options, and show the request and what each worker would run

The program:
  --source=SOURCE          the code to train with: the folder of a git repository, whose tracked files
                           are uploaded including uncommitted changes; or URL or URL#REF of a git
                           repository. Default: this repository
  --install=COMMAND        command that installs it, run in its folder; default: a Python 3.12
                           environment in .venv with '.[tpu,gcs,sebulba,remote]'; suites such as
                           Brax need their extra, see docs/launch-tpu-vm.md

The log of worker 0 is read by SSH to its external address, unless one of these is specified:
  --internal_ip            connect to its internal address, from a machine in the same VPC network
  --iap                    connect through Identity-Aware Proxy; needs gcloud's alpha commands

Limits:
  --max_restarts=N         restarts on one slice after failures, preemptions not counted; default: 3
  --backoff=SECONDS        pause before the second attempt at something that failed (creating the
                           slice, a failed trainer); it doubles each time up to 600; default: 30
  --retry_for=SECONDS      how long a failing deletion, upload or download is retried; default: 600
  --patience=SECONDS       how long an active slice may take to write to the bucket; default: 1800
  --report_timeout=SECONDS how long workers wait for the exit codes of the others; must exceed the
                           trainer's hosts.start_timeout_s; default: 1200
  --poll=SECONDS           interval between requests for the state of the slice; default: 15

Exit code: that of COMMAND. 0, 2, 3, 7 and 130 are final. After 42 (preempted) COMMAND is restarted
without limit, after all other codes at most --max_restarts times.
TEXT
}

say() { echo "tpu_vm: $*" >&2; }
error() { say "error: $*"$'\n''See docs/launch-tpu-vm.md#messages'; }
reject() { error "$*; see --help" && exit 2; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name='' zone='' accelerator_type='' runtime_version='' source=$(dirname "$here")
install="python3 -m pip install --quiet uv && python3 -m uv venv --quiet --python=3.12 &&
  python3 -m uv pip install --quiet -e '.[tpu,gcs,sebulba,remote]'"
keep=false self_delete=false dry_run=false
max_restarts=3 backoff=30 retry_for=600 patience=1800 report_timeout=1200 poll=15
create_flags=(--quiet) project=() ssh=(compute tpus tpu-vm ssh) ssh_flags=(--quiet)
while (($#)); do
  case $1 in
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --accelerator_type=*) accelerator_type=${1#*=} ;;
    --runtime_version=*) runtime_version=${1#*=} ;;
    --project=*) project=("$1") ;;
    --spot) create_flags+=(--spot) ;;
    --create_flag=*) create_flags+=("${1#*=}") ;;
    --self_delete) self_delete=true ;;
    --keep) keep=true ;;
    --dry_run) dry_run=true ;;
    --source=*) source=${1#*=} ;;
    --install=*) install=${1#*=} ;;
    --internal_ip) ssh_flags+=(--internal-ip) ;;
    --iap) ssh=(alpha compute tpus tpu-vm ssh) && ssh_flags+=(--tunnel-through-iap) ;;
    --max_restarts=*) max_restarts=${1#*=} ;;
    --backoff=*) backoff=${1#*=} ;;
    --retry_for=*) retry_for=${1#*=} ;;
    --patience=*) patience=${1#*=} ;;
    --report_timeout=*) report_timeout=${1#*=} ;;
    --poll=*) poll=${1#*=} ;;
    --help | -h) usage && exit 0 ;;
    --) shift && break ;;
    *) reject "unknown option $1; put '--' before the command" ;;
  esac
  shift
done

workdir=''
for argument; do [[ $argument != --workdir=* ]] || workdir=${argument#*=}; done
[[ -n $name && -n $zone && -n $accelerator_type ]] ||
  reject "--name, --zone and --accelerator_type are required"
[[ $workdir == gs://* ]] ||
  reject "the command needs --workdir=gs://BUCKET/..., which all workers can reach; got '$workdir'"
[[ $workdir =~ ^gs://[a-z0-9][a-z0-9._-]{2,}/+[^/] ]] ||
  reject "$workdir (--workdir) is no folder of a bucket; names of buckets have three or more \
lower-case letters, digits, '-', '_' and '.'"
[[ $name =~ ^[a-z][a-z0-9-]*$ ]] ||
  reject "--name=$name must begin with a letter and have lower-case letters, digits and '-' only"
[[ -d $source || $source == *://* ]] || reject "--source=$source is neither a folder nor a URL"
if [[ -d $source ]]; then
  for argument; do
    # Shipped configs may be given by name; absolute paths are the workers' own.
    [[ $argument =~ ^--config=([^/:][^:]*) ]] || continue
    file=${BASH_REMATCH[1]}
    [[ $file == */* || $file == *.py ]] || continue
    git -C "$source" ls-files --error-unmatch "$file" >/dev/null 2>&1 ||
      reject "$file (--config) is not tracked by git in $source, so it would not be uploaded"
  done
fi
! $keep || ! $self_delete || reject "--keep and --self_delete exclude each other"
for option in max_restarts backoff retry_for patience report_timeout; do
  [[ ${!option} =~ ^[0-9]+$ ]] || reject "--$option=${!option} is not a whole number"
done
[[ $poll =~ ^[0-9.]*[1-9][0-9.]*$ ]] || reject "--poll=$poll is not a positive number"
type=none
[[ ! $accelerator_type =~ ^(v[0-9a-z]+)-[0-9]+$ ]] || type=${BASH_REMATCH[1]}
case $type in
  v2 | v3 | v4) default_version=tpu-ubuntu2204-base ;;
  v5litepod) default_version=v2-alpha-tpuv5-lite ;;
  v5p) default_version=v2-alpha-tpuv5 ;;
  v6e) default_version=v2-alpha-tpuv6e ;;
  *)
    [[ -n $runtime_version ]] || reject "unknown --accelerator_type=$accelerator_type; known: v2-N, \
v3-N, v4-N, v5litepod-N (v5e), v5p-N and v6e-N; any other needs --runtime_version as well"
    ;;
esac
runtime_version=${runtime_version:-$default_version}
where=(--zone="$zone" ${project[@]+"${project[@]}"})
tpus() { gcloud compute tpus "$@" "${where[@]}"; }

# These two are also part of the workers' script.
retry() { # COMMAND ...: repeats a failing command for retry_for seconds
  local deadline=$((SECONDS + retry_for))
  until "$@"; do
    ((SECONDS < deadline)) || return 1
    sleep "$poll"
  done
}
pause() { # N: the pause after failure number N, the first being 0
  local seconds=$((backoff << ($1 < 10 ? $1 : 10)))
  sleep $((seconds < 600 ? seconds : 600))
}

files=$(mktemp -d)
# Beside the workdir, because the trainer may move or list what is in the workdir.
launches=${workdir%/}.launch/$(date -u +%Y%m%d-%H%M%S)
ours=false logs=''
# shellcheck disable=SC2329 # called by trap
finish() {
  local code=$?
  trap '' HUP INT TERM # a second Ctrl-C must not leave the slice behind
  stop_logs
  if $ours && $keep; then
    say "$name is kept and billed until you run:
  gcloud compute tpus queued-resources delete $name --force ${where[*]}"
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

# These return their status explicitly: in a trap, plain return takes the status from before it.
describe() { # FORMAT: prints it, or NOT_FOUND
  ! tpus queued-resources describe "$name" --format="$1" 2>"$files/errors" || return 0
  ! grep -q NOT_FOUND "$files/errors" || { echo NOT_FOUND && return 0; }
  cat "$files/errors" >&2
  return 1
}
state() { describe 'value(state.state)'; }

# shellcheck disable=SC2329 # called by retry
try_delete() {
  ! tpus queued-resources delete "$name" --force --quiet 2>"$files/errors" || return 0
  ! grep -q NOT_FOUND "$files/errors" || return 0
  cat "$files/errors" >&2
  return 1
}

delete() {
  say "deleting $name"
  if ! retry try_delete; then
    error "$name COULD NOT BE DELETED and may still be billed. Run:
  gcloud compute tpus queued-resources delete $name --force ${where[*]}"
    return 1
  fi
  ours=false
}

prepare() { # COMMAND ...: sets the request for the slice, and writes the scripts that its workers run
  # The description tells this slice from one that another launcher creates under the same name.
  creation=(
    queued-resources create "$name" --node-id="$name" --accelerator-type="$accelerator_type"
    --runtime-version="$runtime_version" --description="$launch" "${create_flags[@]}"
    --metadata-from-file="startup-script=$files/startup,shutdown-script=$files/shutdown"
  )
  {
    printf '#!/usr/bin/env bash\nname=%q\nlaunch=%q\nsource=%q\n' "$name" "$launch" "$source"
    printf 'install=%q\nself_delete=%q\n' "$install" "$self_delete"
    printf 'max_restarts=%q\nbackoff=%q\nretry_for=%q\n' "$max_restarts" "$backoff" "$retry_for"
    printf 'report_timeout=%q\npoll=%q\n' "$report_timeout" "$poll"
    printf 'where=(' && printf '%q ' "${where[@]}" && printf ')\n'
    printf 'command=(' && printf '%q ' "$@" && printf ')\n'
    declare -f retry pause
    cat "$here/tpu_worker.sh"
  } >"$files/startup"
  cat >"$files/shutdown" <<'SCRIPT'
#!/usr/bin/env bash
pid=$(cat "${PODRACER_HOME:-/var/lib/podracer}/pid") && kill -TERM "$pid"
while kill -0 "$pid" 2>/dev/null; do sleep 0.5; done
SCRIPT
}

request() { # requests the slice; sets ours
  say "requesting $name, $accelerator_type in $zone"
  ours=true # from here on: an interrupted request may still create the slice
  ! tpus "${creation[@]}" || return 0
  # A failed request may have created the slice all the same. As long as that is unknown, it is ours.
  local owner
  owner=$(retry describe 'value(tpu.nodeSpec[0].node.description)') || return 1
  [[ $owner != "$launch" ]] || return 0
  ours=false
  [[ $owner == NOT_FOUND ]] || error "$name exists, but was not created by this launcher; it is \
not deleted. If it is yours, run: gcloud compute tpus queued-resources delete $name --force ${where[*]}"
  return 1
}

follow() { # shows the log of worker 0, and reconnects when the connection breaks
  local lines=+1
  while kill -0 $$; do # as long as the launcher runs
    gcloud "${ssh[@]}" "$name" --worker=0 "${ssh_flags[@]}" "${where[@]}" \
      --command="tail -n $lines -F /var/lib/podracer/log" || say "no connection to the log yet"
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

watch() { # returns when the command has ended (sets code) or the slice has ended (sets now)
  local last='' deadline=0
  while true; do
    now=$(state) || now=$last # a failed request says nothing about the slice
    # Read after the state: an exit code may be written just before the slice ends.
    code=$(gcloud storage cat "$launch/*.exit" 2>/dev/null | head -n 1) || true
    [[ -z $code ]] || return 0
    [[ $now == "$last" ]] || say "$name is ${now:-in an unknown state}"
    case $now in
      SUSPENDED | FAILED | NOT_FOUND) return 0 ;;
      ACTIVE)
        has_run=true failures=0
        [[ -n $logs ]] || { start_logs && deadline=$((SECONDS + patience)); }
        ((SECONDS < deadline)) || gcloud storage ls "$launch/*.log" >/dev/null || {
          error "no worker has written to $launch within $patience seconds; is the slice's \
service account allowed to write there?"
          exit 1
        }
        ;;
    esac
    last=$now
    sleep "$poll"
  done
}

folder=''
[[ ! -d $source ]] || { folder=$source && source=$launches/source.tar.gz; }
if $dry_run; then
  launch=$launches/slice-0
  prepare "$@"
  printf '%q ' gcloud compute tpus "${creation[@]}" "${where[@]}" && echo
  echo "# where $files/startup, which each worker runs as it boots, is:"
  cat "$files/startup"
  exit
fi
now=$(state) || { error "cannot read the state of $name from Google Cloud" && exit 1; }
[[ $now == NOT_FOUND ]] || reject "$name already exists in $zone (state $now); choose another --name, \
or delete it: gcloud compute tpus queued-resources delete $name --force ${where[*]}"
if [[ -n $folder ]]; then
  commit=$(git -C "$folder" stash create) # empty if there are no uncommitted changes
  git -C "$folder" archive --format=tar.gz --output="$files/source.tar.gz" "${commit:-HEAD}"
  gcloud storage cp --quiet "$files/source.tar.gz" "$source"
fi
has_run=false failures=0
for ((slice = 0; ; slice++)); do
  launch=$launches/slice-$slice code='' now=''
  prepare "$@"
  ! request || watch
  [[ -z $code ]] || break
  stop_logs
  case $now in
    SUSPENDED) say "$name was preempted" ;;
    FAILED) error "the request for $name failed: $(describe 'value(state)' || true)" ;;
    NOT_FOUND) ours=false && error "$name was deleted by somebody else" && exit 1 ;;
    *) error "$name could not be created" ;;
  esac
  # A first request fails because it is wrong or quota is missing, later ones only lack capacity.
  $has_run || [[ $now == SUSPENDED ]] || exit 1
  ! $ours || delete || exit 1
  [[ $now == SUSPENDED ]] || pause $((failures++))
done
sleep "$poll" # so that the last lines of the log arrive
say "exit code $code; logs of all workers: $launch"
((code == 0)) || gcloud storage cat "$launch/*.log" | tail -n 50 >&2 || true
exit "$code"
