"""Which environments of a workdir may be made without permission."""

import pytest

from podracer import envs
from podracer.envs.permission import OTHER_SUITES, SAFE_SUITES, needs_permission


@pytest.mark.parametrize(
    ("env_id", "kwargs", "reason"),
    [
        ("gymnax:CartPole-v1", {}, None),
        ("gymnax:FrozenLake-misc", {"map_name": "8x8"}, None),
        ("dummy:counting", {"length": 3}, None),
        ("brax:ant", {"backend": "spring"}, None),
        ("navix:Navix-Empty-8x8-v0", {"observation_fn": "rgb"}, None),
        ("xminigrid:MiniGrid-Empty-8x8", {}, None),
        ("xminigrid:XLand-MiniGrid-R1-9x9", {"benchmark": "b"}, "has env_kwargs.benchmark='b', wh"),
        ("envpool:Pong-v5", {"episodic_life": True, "stack_num": 2}, None),
        ("gymnasium:LunarLander-v3", {"gravity": -9.0}, None),
        ("my_module:MyEnv", {}, "imports the module 'my_module'"),
        ("my.package:MyEnv", {}, "imports the module 'my.package'"),
        ("gymnasium:my.package:My-v0", {}, "imports the module 'my.package'"),
        ("gymnasium:Ant-v5", {"xml_file": "a.xml"}, "has env_kwargs.xml_file='a.xml', which"),
        ("envpool:Basic-v1", {"vzd_path": "/x"}, "has env_kwargs.vzd_path='/x', which"),
        ("gymnasium:A-v0", {"a": [1, {"b": "c"}]}, "has env_kwargs.a[1].b='c', which"),
    ],
)
def test_modules_and_strings_need_permission(env_id, kwargs, reason):
    found = needs_permission(env_id, kwargs)
    assert found is None if reason is None else found.startswith(reason)


def test_every_suite_is_known_to_be_safe_or_not():
    assert {*SAFE_SUITES, *OTHER_SUITES} == {*envs.SUITES, *envs.HOST_SUITES}
