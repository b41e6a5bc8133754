# The start-up script of every worker of a slice. It installs the project, trains, and restarts the
# trainer if the exit codes of all workers call for it. tpu_vm.sh writes in front of it:
#   name            name of the slice
#   where           gcloud's flags for the slice's zone and project, an array
#   launch          gs:// folder of this slice's exit codes and logs
#   source          a .tar.gz in gs://, or URL or URL#REF of a git repository
#   install         command that installs the project, run in its folder
#   command         training command, an array
#   self_delete     whether worker 0 deletes the slice at the end, true or false
#   max_restarts, backoff, retry_for, report_timeout, poll    see tpu_vm.sh --help
#   retry, pause    functions
#
# Google runs this script at every boot, so it must continue a run that a reboot has interrupted, on
# a boot disk that may be new. What has happened is therefore read from the bucket, where nothing is
# overwritten:
#   LAUNCH/ATTEMPT/worker-W.started    worker W has started this attempt
#   LAUNCH/ATTEMPT/worker-W.exit       exit code of its trainer
#   LAUNCH/worker-W.exit               exit code of the run
#   LAUNCH/[ATTEMPT/]worker-W.log      log of worker W
# shellcheck shell=bash disable=SC2154
set -euo pipefail
export HOME=${HOME:-/root} PATH=$PATH:/snap/bin # start-up scripts run without these
home=${PODRACER_HOME:-/var/lib/podracer}
mkdir -p "$home"
exec >>"$home/log" 2>&1
echo $$ >"$home/pid" # for the shutdown script

attribute() {
  curl --silent --fail --retry 10 --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
worker=$(retry attribute agent-worker-number)
workers=$(retry attribute worker-network-endpoints | tr ',' '\n' | grep -c .)

upload_log() { # FOLDER: uploads a copy, because gcloud writes to the log meanwhile
  cp "$home/log" "$home/upload.log" &&
    gcloud storage cp --quiet "$home/upload.log" "$1/worker-$worker.log"
}

upload() { # TEXT OBJECT: writes the object unless it exists
  echo "$1" >"$home/upload" && gcloud storage cp --quiet --no-clobber "$home/upload" "$2"
}

post() { # FOLDER CODE: the log first, because the code may end the slice
  retry upload_log "$1" && retry upload "$2" "$1/worker-$worker.exit"
}

prepare() { # installs the project, if that has not been done, and enters its folder
  if [[ ! -e $home/installed ]]; then
    rm -rf "$home/source" && mkdir "$home/source" && cd "$home/source" || return
    if [[ $source == gs://* ]]; then
      gcloud storage cp --quiet "$source" "$home/source.tar.gz" && tar -xzf "$home/source.tar.gz"
    else
      git clone --quiet "${source%%#*}" . &&
        { [[ $source != *#* ]] || git checkout --quiet "${source#*#}"; }
    fi && bash -c "$install" && touch "$home/installed" || return
  fi
  cd "$home/source"
}

# The shutdown script sends SIGTERM to this script, which passes it on to the trainer.
child='' stopping=false
trap 'stopping=true; [[ -z $child ]] || kill -TERM "$child"' TERM
train() { # sets code, unless the project cannot be installed
  prepare || { echo "worker $worker could not install the project" && return; }
  ! $stopping || exit 0
  PATH=$PWD/.venv/bin:$PATH "${command[@]}" & # not exported: gcloud keeps its own Python
  child=$!
  # A signal interrupts wait, but the trainer still needs its time to save. The last wait returns its
  # exit code, also if the trainer has ended while the signal was handled.
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
  code=0
  wait "$child" || code=$?
  child=''
}

# Every worker reads the codes of all, so that all take the same decision and restart together. A
# worker that does not report in time counts as crashed, for all: its code is written for it.
gather() { # FOLDER: sets codes
  local deadline=$((SECONDS + report_timeout)) other
  while codes=$(gcloud storage cat "$1/*.exit" || true) && (($(wc -w <<<"$codes") < workers)); do
    ! $stopping || exit 0
    if ((SECONDS >= deadline)); then
      for ((other = 0; other < workers; other++)); do upload 1 "$1/worker-$other.exit" || true; done
      codes=$(gcloud storage cat "$1/*.exit") || codes=1
      return
    fi
    sleep "$poll"
  done
}

# Runs even if this script fails, but not if the worker shuts down: a preempted slice is no longer
# billed then, and a rebooted one resumes.
# shellcheck disable=SC2329 # called by trap
delete_slice() {
  if $self_delete && ! $stopping && ((worker == 0)); then
    retry gcloud compute tpus queued-resources delete "$name" --force --async --quiet "${where[@]}"
  fi
}
trap delete_slice EXIT

retry upload_log "$launch" # shows the launcher that this worker is up and may write
objects=$(retry gcloud storage ls "$launch/**")
delay=''
for ((attempt = 0, crashes = 0; ; attempt++)); do
  folder=$launch/$attempt
  if grep -qxF "$folder/worker-$worker.started" <<<"$objects"; then
    code=137 # the worker has rebooted; if the trainer had ended before, its code is there already
  else
    [[ -z $delay ]] || pause "$delay"
    ! $stopping || exit 0
    code=1
    ! retry upload "$(date -u)" "$folder/worker-$worker.started" || train
    echo "worker $worker, attempt $attempt: exit code $code"
  fi
  post "$folder" "$code" || true # otherwise the others will consider this worker crashed
  gather "$folder"
  delay=''
  if final=$(grep -m1 -xE '2|3|7|130' <<<"$codes"); then
    break # a restart would not help
  elif final=$(grep -m1 -vxE '0|42' <<<"$codes"); then
    ((crashes < max_restarts)) || break
    delay=$((crashes++))
  elif final=0 && ! grep -qx 42 <<<"$codes"; then
    break # done
  fi
done
# Without this code the launcher would wait forever, so only --self_delete gives up.
until post "$launch" "$final" || $self_delete; do :; done
! $self_delete || gather "$launch" # so that the other workers have uploaded their logs
