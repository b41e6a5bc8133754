"""Every test process has eight CPU devices, so that meshes of 1, 2, 4 and 8 can be compared."""

import atexit
import gc
import os
import shutil
import signal
import tempfile

import jax

# Shared by all test processes and the processes they start, so that each program is compiled once.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="podracer-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# These flags divide the time of compiling by two to four. .ci/run sets XLA_FLAGS to nothing for
# some tests, which are compiled as for users. XLA ends a process that sets an unknown flag.
flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    flags += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", flags)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
# Full collections take a twelfth of the time, because compiled programs stay, and free little.
gc.set_threshold(700, 10, 1000)
# Started here, so that no test decides on the number of devices.
jax.devices()

# A shell makes its background processes ignore Ctrl-C, which the processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
