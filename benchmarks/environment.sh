# Read by the scripts beside it, at the repository's root: sets $python, and finds a tree that is not installed.
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || command -v "$python" >/dev/null 2>&1 || python=python3
"$python" -c 'import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ("torch", "typer"))))' || {
  echo "$python lacks the packages that the benches need: run \`make venv\`, or name a Python that has them by PYTHON=" >&2
  exit 2
}
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/protos:$PWD/clients${PYTHONPATH:+:$PYTHONPATH}"
