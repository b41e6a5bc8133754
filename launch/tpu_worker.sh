# The start-up script of every worker of a slice: installs the project, trains, and trains again
# where the exit codes say so. tpu_vm.sh writes its settings above this line:
#   launch        gs:// folder for exit codes and logs
#   source        a .tar.gz in gs://, or URL or URL#REF of a git repository
#   install       the command that installs the project, run in its folder
#   max_restarts  restarts after crashes before the run is given up
#   poll          seconds between two looks at the other workers
#   command       the training command, an array
# shellcheck shell=bash disable=SC2154
set -euo pipefail
export HOME=${HOME:-/root} PATH=$PATH:/snap/bin # a start-up script is not given these
home=${PODRACER_HOME:-/var/lib/podracer}
mkdir -p "$home"
exec >>"$home/log" 2>&1
echo $$ >"$home/pid" # for the shut-down script

attribute() {
  curl --silent --fail --retry 10 --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
worker=$(attribute agent-worker-number)
workers=$(attribute worker-network-endpoints | tr ',' '\n' | grep -c .)

gcloud storage cp --quiet "$home/log" "$launch/worker-$worker.log" # the first sign of life

post() { # FOLDER CODE: the log goes first, because the code may end the slice
  for _ in 1 2 3 4 5; do # a code that is lost leaves the launcher waiting
    gcloud storage cp --quiet "$home/log" "$1/worker-$worker.log" &&
      echo "$2" | gcloud storage cp --quiet - "$1/worker-$worker.exit" && return
    sleep "$poll"
  done
  return 1
}

prepare() {
  rm -rf "$home/source" && mkdir "$home/source" && cd "$home/source" || return
  if [[ $source == gs://* ]]; then
    gcloud storage cp --quiet "$source" "$home/source.tar.gz" && tar -xzf "$home/source.tar.gz"
  else
    git clone --quiet "${source%%#*}" . &&
      { [[ $source != *#* ]] || git checkout --quiet "${source#*#}"; }
  fi && bash -c "$install" && export PATH="$PWD/.venv/bin:$PATH"
}

# The shut-down script sends SIGTERM when the slice is taken away; the trainer is handed it.
child='' stopping=false
trap 'stopping=true; [[ -z $child ]] || kill -TERM "$child"' TERM
train() { # sets code
  "${command[@]}" &
  child=$!
  # A signal ends wait early; the trainer still needs its time to save.
  while code=0 && { wait "$child" || code=$?; } && kill -0 "$child" 2>/dev/null; do :; done
  child=''
}

# Every worker reads the codes of all, so that all decide alike and start again together.
# A worker that does not report within ten minutes counts as a crash.
gather() { # FOLDER: sets codes
  local deadline=$((SECONDS + 600))
  while codes=$(gcloud storage cat "$1/*.exit" || true) && (($(wc -w <<<"$codes") < workers)); do
    ! $stopping || exit 0
    ((SECONDS < deadline)) || { codes+=$'\n1' && return; }
    sleep "$poll"
  done
}

prepare || { echo "worker $worker could not install" && post "$launch" 1 && exit 1; }
for ((attempt = 0, crashes = 0; ; attempt++)); do
  ! $stopping || exit 0
  train
  echo "worker $worker, attempt $attempt: exit code $code"
  post "$launch/$attempt" "$code"
  gather "$launch/$attempt"
  if final=$(grep -m1 -xE '2|3|130' <<<"$codes"); then
    break # no restart helps
  elif final=$(grep -m1 -vxE '0|42' <<<"$codes"); then
    ((crashes++ < max_restarts)) || break
  elif final=0 && ! grep -qx 42 <<<"$codes"; then
    break # done
  fi
done
post "$launch" "$final"
