"""Every test process has eight CPU devices, so that meshes of 1, 2, 4 and 8 can be compared."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
