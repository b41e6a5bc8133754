#!/usr/bin/env bash
# Steps environments on spot VMs for a learner on a Cloud TPU slice: see --help and
# docs/launch-workers.md.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/tpu_workers.sh run --name=NAME --zone=ZONE --size=N [OPTION ...] -- LAUNCHER ...
       launch/tpu_workers.sh create --name=NAME --zone=ZONE --size=N [OPTION ...]
       launch/tpu_workers.sh resize --name=NAME --zone=ZONE --size=N
       launch/tpu_workers.sh delete --name=NAME --zone=ZONE
       launch/tpu_workers.sh learner --name=NAME -- COMMAND ...

create makes a managed instance group of spot VMs, each of which runs a worker and is replaced when it
is preempted; a token and a certificate in Secret Manager; and firewall rules that let only workers
reach the learner's port. run does the same, runs LAUNCHER, such as launch/tpu_vm.sh --name=NAME,
and deletes everything at the end, also after a failure and after Ctrl-C. delete deletes everything,
whatever create has left behind.

learner runs on the slice: it reads the token and the certificate and adds them to COMMAND, which
needs --config.remote.num_envs. The slice needs the name NAME and the network tag NAME-learner.

Required:
  --name=NAME              name of the slice that the workers connect to
  --zone=ZONE              zone of the slice and of the workers
  --size=N                 number of workers
  --folder=gs://FOLDER     where run and create put the code of the workers
  --worker_account=EMAIL   service account of the workers, for run and create; it needs
                           roles/tpu.viewer and must be able to read the folder
  --slice_account=EMAIL    service account of the slice, for run and create

Options:
  --project=PROJECT        default: the project that gcloud is configured with
  --network=NETWORK        network of the slice and of the workers; default: default
  --port=PORT              port of the learner; default: 5000
  --machine_type=TYPE      machine of a worker; default: c2d-highcpu-8
  --num_envs=N             environments of a worker; default: 64
  --worker_flag=FLAG       additional flag of podracer.worker, such as --allow_env=ENV; can be
                           repeated
  --template_flag=FLAG     additional flag of 'gcloud compute instance-templates create', such as
                           --no-address; can be repeated
  --source=FOLDER          git repository whose tracked files the workers install, with uncommitted
                           changes; default: this repository
  --install=COMMAND        command that installs it, run in its folder; default: a Python environment
                           in .venv with '.[sebulba,remote]'
  --retry_for=SECONDS      how long a failing deletion is retried; default: 600
  --poll=SECONDS           interval between retries, and between requests of a worker for the
                           slice's addresses; default: 60

Exit code of run: that of LAUNCHER; 1 if something could not be deleted.
TEXT
}

say() { echo "tpu_workers: $*" >&2; }
error() { say "error: $*"$'\n''See docs/launch-workers.md#messages'; }
reject() { error "$*; see --help" && exit 2; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
action=${1:---help}
case $action in
  run | create | resize | delete | learner) shift ;;
  --help | -h) usage && exit 0 ;;
  *) reject "unknown action $action" ;;
esac
name='' zone='' size='' folder='' worker_account='' slice_account='' source=$(dirname "$here")
network=default port=5000 machine_type=c2d-highcpu-8 num_envs=64 retry_for=600 poll=60
install="apt-get -qq update && apt-get -qq install --yes python3-venv &&
  python3 -m venv .venv && .venv/bin/pip install --quiet -e '.[sebulba,remote]'"
project=() worker_flags=() template_flags=()
while (($#)); do
  case $1 in
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --size=*) size=${1#*=} ;;
    --folder=*) folder=${1#*=} ;;
    --worker_account=*) worker_account=${1#*=} ;;
    --slice_account=*) slice_account=${1#*=} ;;
    --project=*) project=("$1") ;;
    --network=*) network=${1#*=} ;;
    --port=*) port=${1#*=} ;;
    --machine_type=*) machine_type=${1#*=} ;;
    --num_envs=*) num_envs=${1#*=} ;;
    --worker_flag=*) worker_flags+=("${1#*=}") ;;
    --template_flag=*) template_flags+=("${1#*=}") ;;
    --source=*) source=${1#*=} ;;
    --install=*) install=${1#*=} ;;
    --retry_for=*) retry_for=${1#*=} ;;
    --poll=*) poll=${1#*=} ;;
    --help | -h) usage && exit 0 ;;
    --) shift && break ;;
    *) reject "unknown option $1" ;;
  esac
  shift
done

[[ $name =~ ^[a-z][-a-z0-9]*$ ]] || reject "--name=$name is not the name of a slice"
[[ $action == learner || -n $zone ]] || reject "--zone is required"
case $action in
  run | create | resize) [[ $size =~ ^[0-9]+$ ]] || reject "--size=$size is not a whole number" ;;
esac
case $action in
  run | create)
    [[ $folder == gs://* ]] || reject "--folder=$folder is not a gs:// folder"
    [[ -n $worker_account && -n $slice_account ]] ||
      reject "--worker_account and --slice_account are required"
    ;;
esac
case $action in
  run | learner) (($#)) || reject "'-- COMMAND ...' is missing" ;;
  *) ((!$#)) || reject "$action takes no command" ;;
esac
for option in port num_envs retry_for; do
  [[ ${!option} =~ ^[0-9]+$ ]] || reject "--$option=${!option} is not a whole number"
done
group=$name-workers token=$name-token tls=$name-tls
# In the order in which they can be deleted.
resources=(
  "compute instance-groups managed:$group"
  "compute instance-templates:$group"
  "compute firewall-rules:$group-allow"
  "compute firewall-rules:$group-deny"
  "secrets:$token"
  "secrets:$tls"
)
files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT

retry() { # COMMAND ...: repeats a failing command for retry_for seconds
  local deadline=$((SECONDS + retry_for))
  until "$@"; do
    ((SECONDS < deadline)) || return 1
    sleep "$poll"
  done
}

describe() { # RESOURCE: sets id, and the arrays kind and where, its flags
  id=${1#*:} where=(--quiet ${project[@]+"${project[@]}"})
  read -ra kind <<<"${1%%:*}"
  [[ $1 != *managed:* ]] || where+=(--zone="$zone")
}

list() { # RESOURCE: prints the names of all of its kind
  local kind id where
  describe "$1"
  gcloud "${kind[@]}" list --format='value(name)' "${where[@]/#--zone=/--zones=}"
}

# These return their status explicitly: in a trap, plain return takes the status from before it.
remove() { # RESOURCE: succeeds once it does not exist
  local kind id where names
  names=$(list "$1") || return 1
  describe "$1"
  grep -qxF "$id" <<<"$names" || return 0
  gcloud "${kind[@]}" delete "$id" "${where[@]}" || return 1
}

delete() {
  local resource kind id where failed=0
  say "deleting the workers of $name"
  for resource in "${resources[@]}"; do
    retry remove "$resource" && continue
    describe "$resource"
    error "$id COULD NOT BE DELETED and may still be billed. Run:
  gcloud ${kind[*]} delete $id ${where[*]}"
    failed=1
  done
  return "$failed"
}

make_secrets() {
  openssl rand -hex 32 >"$files/token"
  # The addresses of a slice change when it is replaced. Workers call its hosts by names of their own,
  # see work.
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 \
    -subj "/CN=$name" -addext "subjectAltName=DNS:*.podracer.internal" \
    -keyout "$files/key" -out "$files/certificate" 2>/dev/null
  cat "$files/certificate" "$files/key" >"$files/tls"
  local secret
  for secret in token tls; do
    gcloud secrets create "$name-$secret" --replication-policy=automatic \
      --data-file="$files/$secret" ${project[@]+"${project[@]}"}
  done
  allow "$token" "$slice_account"
  allow "$token" "$worker_account"
  allow "$tls" "$slice_account"
}

allow() { # SECRET ACCOUNT: lets an account read a secret
  gcloud secrets add-iam-policy-binding "$1" --member="serviceAccount:$2" \
    --role=roles/secretmanager.secretAccessor ${project[@]+"${project[@]}"} >/dev/null
}

make_rules() { # by default, all machines of a network may reach each other
  local common=(--network="$network" --direction=INGRESS --rules="tcp:$port"
    --target-tags="$name-learner" ${project[@]+"${project[@]}"})
  gcloud compute firewall-rules create "$group-allow" --action=ALLOW --priority=900 \
    --source-tags="$group" "${common[@]}"
  gcloud compute firewall-rules create "$group-deny" --action=DENY --priority=910 \
    --source-ranges=0.0.0.0/0 "${common[@]}"
}

make_group() {
  local commit
  commit=$(git -C "$source" stash create) # empty if there are no uncommitted changes
  git -C "$source" archive --format=tar.gz --output="$files/source.tar.gz" "${commit:-HEAD}"
  gcloud storage cp --quiet "$files/source.tar.gz" "${folder%/}/$group.tar.gz"
  write_script >"$files/startup"
  gcloud compute instance-templates create "$group" --machine-type="$machine_type" \
    --provisioning-model=SPOT --instance-termination-action=STOP --image-family=debian-12 \
    --image-project=debian-cloud --network="$network" --tags="$group" \
    --service-account="$worker_account" --scopes=cloud-platform \
    --metadata-from-file="startup-script=$files/startup" \
    ${template_flags[@]+"${template_flags[@]}"} ${project[@]+"${project[@]}"}
  gcloud compute instance-groups managed create "$group" --template="$group" --size="$size" \
    --zone="$zone" ${project[@]+"${project[@]}"}
}

write_script() { # the start-up script of a worker
  printf '#!/usr/bin/env bash\nset -euo pipefail\nname=%q\narchive=%q\ninstall=%q\ntoken=%q\n' \
    "$name" "${folder%/}/$group.tar.gz" "$install" "$token"
  printf 'port=%q\nnum_envs=%q\npoll=%q\n' "$port" "$num_envs" "$poll"
  printf 'certificate=%q\n' "$(cat "$files/certificate")"
  printf 'project=(' && printf '%q ' ${project[@]+"${project[@]}"} && printf ')\n'
  printf 'where=(' && printf '%q ' --zone="$zone" ${project[@]+"${project[@]}"} && printf ')\n'
  printf 'worker_flags=(' && printf '%q ' ${worker_flags[@]+"${worker_flags[@]}"} && printf ')\n'
  declare -f prepare update_hosts work
  echo work
}

# These three functions are the start-up script.
# shellcheck disable=SC2154 # write_script assigns these variables
prepare() { # installs the project, if that has not been done, and reads the token
  if [[ ! -e $home/installed ]]; then
    rm -rf "$home/source" && mkdir "$home/source" && cd "$home/source" || return
    gcloud storage cp --quiet "$archive" "$home/source.tar.gz" &&
      tar -xzf "$home/source.tar.gz" && bash -c "$install" && touch "$home/installed" || return
  fi
  gcloud secrets versions access latest --secret="$token" --out-file="$home/token" \
    ${project[@]+"${project[@]}"}
}

update_hosts() { # writes the addresses of the slice's hosts to the file of hosts
  local found address number=0
  found=$(gcloud compute tpus tpu-vm describe "$name" "${where[@]}" \
    --format='value(networkEndpoints[].ipAddress)') || return
  [[ -n $found ]] || return
  # grep fails if it leaves no line.
  { grep -v ' # podracer$' "$hosts" || true; } >"$home/hosts"
  for address in ${found//[;,]/ }; do
    echo "$address host-$((number++)).podracer.internal # podracer"
  done >>"$home/hosts"
  cmp --silent "$home/hosts" "$hosts" || cat "$home/hosts" >"$hosts"
}

# shellcheck disable=SC2154
work() { # steps environments for as long as the machine exists
  export HOME=${HOME:-/root} PATH=$PATH:/snap/bin # start-up scripts run without these
  home=${PODRACER_HOME:-/var/lib/podracer} hosts=${PODRACER_HOSTS:-/etc/hosts}
  mkdir -p "$home"
  umask 077
  echo "$certificate" >"$home/certificate"
  until prepare; do sleep "$poll"; done
  until update_hosts; do sleep "$poll"; done
  # A request that fails is made again at the next poll; until then the last addresses stay.
  while sleep "$poll"; do update_hosts || true; done &
  cd "$home/source"
  # When a run is over, the next one of this name is served.
  while true; do
    local connect
    connect=$(sed -n "s/^.* \(.*\) # podracer\$/\1:$port/p" "$hosts" | paste --serial --delimiters=,)
    .venv/bin/python -m podracer.worker --connect="$connect" --num_envs="$num_envs" \
      --token_file="$home/token" --tls_ca="$home/certificate" \
      ${worker_flags[@]+"${worker_flags[@]}"} || echo "exit code $?"
    sleep "$poll"
  done
}

create() {
  local resource names
  for resource in "${resources[@]}"; do
    names=$(list "$resource")
    ! grep -qxF "${resource#*:}" <<<"$names" ||
      reject "${resource#*:} exists; delete the workers of $name first"
  done
  # From here on, what exists is ours.
  # shellcheck disable=SC2154 # code is assigned by the trap
  trap 'code=$?; trap "" HUP INT TERM; delete || code=1; rm -rf "$files"; exit "$code"' EXIT
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
  make_secrets
  make_rules
  make_group
}

run() { # LAUNCHER ...
  local child signal code=0
  set -m # a process group of its own, to which signals are passed on
  "$@" </dev/null &
  child=$!
  set +m
  for signal in HUP INT TERM; do
    # shellcheck disable=SC2064 # the values of now
    # The child may have ended already.
    trap "kill -$signal -- -$child || true" "$signal"
  done
  # A signal interrupts wait. The last wait returns the exit code.
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
  wait "$child" || code=$?
  exit "$code"
}

learner() { # COMMAND ...: in place of this script, so that SIGTERM reaches it
  local private
  private=$(mktemp -d) # nobody else can read it
  gcloud secrets versions access latest --secret="$token" --out-file="$private/token" \
    ${project[@]+"${project[@]}"}
  gcloud secrets versions access latest --secret="$tls" --out-file="$private/tls" \
    ${project[@]+"${project[@]}"}
  exec "$@" --config.remote.listen="0.0.0.0:$port" --config.remote.token_file="$private/token" \
    --config.remote.tls_cert="$private/tls" --config.remote.tls_key="$private/tls"
}

case $action in
  run) # not create && run: within a condition, failures would not end create
    create
    run "$@"
    ;;
  create)
    create
    trap 'rm -rf "$files"' EXIT
    say "created $size workers, which are billed until you run:
  launch/tpu_workers.sh delete --name=$name --zone=$zone ${project[*]-}"
    ;;
  resize)
    gcloud compute instance-groups managed resize "$group" --size="$size" --zone="$zone" \
      ${project[@]+"${project[@]}"}
    ;;
  delete) delete ;;
  learner) learner "$@" ;;
esac
