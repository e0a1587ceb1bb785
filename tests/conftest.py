"""For all tests: examples that hypothesis makes are the same in every run, and may take their time.

Other examples each time:  pytest --hypothesis-profile=exploring
"""

from hypothesis import HealthCheck, settings

# On a busy machine any example can take long, and that says nothing about the code.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("exploring", **PATIENT)
settings.register_profile("repeatable", derandomize=True, **PATIENT)
settings.load_profile("repeatable")
