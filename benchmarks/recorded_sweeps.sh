# Sourced by the *_results.sh that measure sweeps, from the project's root. They set:
#   out       where results go
#   only      names of the sweeps that are wanted, between blanks; one of blanks alone wants all
#   limit_s   seconds that a sweep may take
#   always    overrides of every sweep
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# Whether the sweep of this name is to be measured.
wanted() { [[ -z ${only// /} || $only == *" $1 "* ]]; }

# NAME OVERRIDES...: a sweep into OUT/NAME, then its analysis; the log ends in the seconds it took.
sweep() {
  local name=$1 start=$SECONDS
  shift
  wanted "$name" || return 0
  timeout "$limit_s" python3 launch.py -m "${always[@]}" hydra.sweep.dir="$out/$name" "$@" > "$out/$name.log" 2>&1
  echo "$((SECONDS - start)) s" >> "$out/$name.log"
  timeout 60 python3 analyze.py "$out/$name" > "$out/$name.txt" 2>&1
  echo "$name: $(tail -2 "$out/$name.log" | tr '\n' ' ')"
}
