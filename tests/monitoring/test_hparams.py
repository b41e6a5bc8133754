"""What TensorBoard's HParams tab reads of runs: the settings and the evaluation of each agent."""

from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from podracer.monitoring import hparams
from tests.helpers import make_config

# protobuf defines its classes at run time, which a type checker doesn't see.
api: Any = api_pb2


def sessions(logdir):
    """What TensorBoard shows: settings that differ and metrics, by the name of the session."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logdir)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(logdir))
    context = backend_context.Context(TBContext(data_provider=provider))
    asked = RequestContext()
    metadata = context.hparams_metadata(asked, "")
    experiment = context.experiment_from_metadata(asked, "", True, metadata, [])
    differ = {x.name for x in experiment.hparam_infos if x.differs}
    request = api.ListSessionGroupsRequest(
        allowed_statuses=[api.STATUS_SUCCESS],
        slice_size=99,
        col_params=[api.ColParams(metric=x.name) for x in experiment.metric_infos],
    )
    groups = list_session_groups.Handler(asked, context, "", request).run().session_groups
    return {
        group.sessions[0].name: (
            {name: value.number_value for name, value in group.hparams.items() if name in differ},
            {x.name.tag: x.value for x in group.metric_values},
        )
        for group in groups
    }


def test_each_agent_of_each_run_is_a_session(tmp_path):
    sweep = {"learning_rate": "uniform(0.1, 0.9)"}
    population = make_config(population=4, sweep=sweep, selection__every=1)
    row = {"step": 80, "member_1/learning_rate": 0.75}
    row |= {f"member_{i}/eval/episode_return": i + 0.5 for i in range(4)}
    alone = make_config(learning_rate=0.25)
    for name, config, last in (
        ("many", population, {**row, "member_3/eval/episode_return": 9.0}),
        ("many", population, row),
        ("one", alone, {"step": 50, "eval/episode_return": 7.0}),
    ):
        hparams.write(tmp_path / name / "tensorboard", config, last)
    found = sessions(tmp_path)
    rates = [x.settings["learning_rate"] for x in population.members]
    rates[1] = 0.75
    expected = {
        f"many/tensorboard/member_{i}": ({"learning_rate": rate}, {"eval/episode_return": i + 0.5})
        for i, rate in enumerate(rates)
    }
    expected["one/tensorboard/seed_0"] = ({"learning_rate": 0.25}, {"eval/episode_return": 7.0})
    assert found == {
        name: (pytest.approx(settings), pytest.approx(metrics))
        for name, (settings, metrics) in expected.items()
    }
