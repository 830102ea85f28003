"""``python -m support.plane_driver --context FILE --id NAME``: the driver, with stubs in the place of engines, trainer
and roles. Ray, Serve, the router and etcd are real."""

from __future__ import annotations

import os
import sys
from functools import partial

from elastic_rl.driver import __main__ as driver
from elastic_rl.driver import compute, ray_service
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.trainer_group import TrainerGroup
from elastic_rl.roles.spec import RoleSpec
from support.stub_actors import StubEngine, StubRole, StubTrainer

LOST_S_ENV = "STUB_RAY_LOST_S"
"""Environment variable with the seconds after which a head that does not come up is given up."""


def stubs() -> dict[str, object]:
    """What takes the place of these names of ``compute``."""
    return {"EnginePool": partial(EnginePool, body=StubEngine), "TrainerGroup": partial(TrainerGroup, body=StubTrainer),
            "ROLES": {"stub": RoleSpec(name="stub", cls=StubRole),
                      "advantages": RoleSpec(name="advantages", cls=StubRole, is_wanted=lambda cfg: bool(cfg.roles))}}


if __name__ == "__main__":
    for name, stub in stubs().items():
        setattr(compute, name, stub)
    ray_service._LOST_S = float(os.environ.get(LOST_S_ENV, ray_service._LOST_S))
    sys.exit(driver.main())
