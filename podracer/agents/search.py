"""Monte-Carlo tree search by mctx (https://github.com/google-deepmind/mctx), as agents use it.

Every environment has its own random key, so that what is found does not depend on how environments
are spread over devices. mctx takes one key a batch, and is therefore called for each environment.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx
import optax
from flax import struct

from podracer.agents.branches import ALL_ACTIONS, Branches
from podracer.agents.value_scale import Support
from podracer.errors import ConfigError, unknown
from podracer.nets import masks
from podracer.nets.model import Model
from podracer.types import Array, ArrayTree, Params

# mctx is made of dataclasses whose constructors type checkers do not understand.
lib: Any = mctx

POLICIES = ("gumbel", "muzero")
# ``jax.random.split`` folds small numbers into a key, and mctx splits the key of a search. The key
# of a root's actions comes from a number that no split reaches: they are not drawn with the noise.
BRANCHES_SALT = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Settings of a search.

    Attributes:
      policy: "gumbel", Gumbel MuZero (https://openreview.net/forum?id=bERaNdoegnO), which improves
        its policy with any number of simulations; or "muzero", upper confidence bounds with
        Dirichlet noise at the root (https://arxiv.org/abs/1911.08265, appendix B).
      simulations: number of simulations of a search.
      considered: number of actions that "gumbel" considers at the root.
      value_scale: how much values, scaled to [0, 1], change the policy of "gumbel" (c_scale; the
        paper has 1 for board games and 0.1 for Atari).
      least_range: values of actions that lie closer together than this are scaled as if they did
        not, so that errors of a network that has learned little are not taken for differences.
      prior_exponent: power to which the network's policy is taken at the root. With 1, as in the
        papers, small differences between values add up from search to search, until a policy takes
        one action only, right or wrong; with less, they are forgotten, and only large ones do.
      dirichlet_fraction: share of the noise in the root's prior of "muzero".
      dirichlet_alpha: concentration of this noise.
      temperature: "muzero" samples actions in proportion to their visits to the power of 1 over
        this number, at first.
      final_temperature: the same after ``temperature_steps``.
      temperature_steps: environment steps in which the temperature moves to its final value; 0
        leaves it.
    """

    policy: str = "gumbel"
    simulations: int = 8
    considered: int = 16
    value_scale: float = 0.1
    least_range: float = 0.1
    prior_exponent: float = 1.0
    dirichlet_fraction: float = 0.25
    dirichlet_alpha: float = 0.3
    temperature: float = 1.0
    final_temperature: float = 0.25
    temperature_steps: int = 0

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise unknown("search policy", self.policy, POLICIES)
        if self.simulations <= 0 or self.considered <= 0:
            raise ConfigError(
                "search needs positive numbers of simulations and of considered actions, got "
                f"{self.simulations} and {self.considered}"
            )
        if not 0 <= self.dirichlet_fraction <= 1 or self.dirichlet_alpha <= 0:
            raise ConfigError(
                "dirichlet_fraction must be in [0, 1] and dirichlet_alpha positive, got "
                f"{self.dirichlet_fraction} and {self.dirichlet_alpha}"
            )
        if self.value_scale <= 0 or self.least_range <= 0:
            raise ConfigError(
                "value_scale and least_range must be positive, got "
                f"{self.value_scale} and {self.least_range}"
            )
        if not 0 <= self.prior_exponent <= 1:
            raise ConfigError(f"prior_exponent must be in [0, 1], got {self.prior_exponent}")
        # With more than 1, actions that are illegal would be drawn.
        if not all(0 <= x <= 1 for x in (self.temperature, self.final_temperature)):
            raise ConfigError(
                "temperature and final_temperature must be in [0, 1], got "
                f"{self.temperature} and {self.final_temperature}"
            )
        if self.temperature_steps < 0:
            raise ConfigError(
                f"temperature_steps must not be negative, got {self.temperature_steps}"
            )

    def temperature_at(self, step: Array) -> Any:
        """The temperature after a number of environment steps, ``[]``."""
        steps = self.temperature_steps
        return optax.linear_schedule(self.temperature, self.final_temperature, steps)(step)


class Found(struct.PyTreeNode):
    """What searches have found, ``[B, ...]``.

    Attributes:
      action: ``[B]`` int32, the action to take.
      policy: ``[B, branches]``, the improved policy.
      value: ``[B]``, of the root: with the policy "muzero" the mean over all simulations, which are
        mostly of good actions; with "gumbel", whose simulations are spread over actions, the mean
        of the actions' values by the improved policy.
      depth: ``[B]`` float32, the depth of the tree, the longest sequence of actions in it.
      actions: ``[B, branches, ...]``, what the numbers of ``policy`` are about, see ``Branches``.
      tree: mctx's ``Tree``, ``[B, nodes, ...]``, if it is kept; else ().
    """

    action: Array
    policy: Array
    value: Array
    depth: Array
    actions: ArrayTree = ()
    tree: Any = ()


class Roots(struct.PyTreeNode):
    """Where searches begin, ``[B, ...]``.

    Attributes:
      logits: ``[B, branches]``, of the prior policy.
      value: ``[B]``.
      state: ``[B, ...]``, what a search steps.
      legal: ``[B, branches]`` bool, see ``masks.legal``; None if all actions are.
    """

    logits: Array
    value: Array
    state: ArrayTree
    legal: Array | None = None


def batch_of_one(tree: Any) -> Any:
    """``[...]`` -> ``[1, ...]``."""
    return jax.tree.map(lambda x: x[None], tree)


# ``(params, key, branches [B], states [B, ...]) -> (mctx.RecurrentFnOutput, next states)``.
Step = Callable[[Params, Array, Array, ArrayTree], tuple[Any, ArrayTree]]


def outcome(reward: Array, discount: Array, logits: Array, value: Array) -> Any:
    """What a ``Step`` returns beside the next states, ``[B, ...]``: the reward and the discount of
    the action, and policy logits and value of the state that it leads to."""
    return lib.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value)


def _depth(parents: Array) -> Array:
    """The depth of trees, from the parents ``[B, nodes]`` of their nodes: -1 where there is none.
    A node comes after its parent."""

    def one(depths: Array, node: Array) -> tuple[Array, None]:
        parent = parents[:, node]
        depth = jnp.take_along_axis(depths, jnp.maximum(parent, 0)[:, None], 1)[:, 0] + 1
        return depths.at[:, node].set(jnp.where(parent >= 0, depth, 0)), None

    depths, _ = jax.lax.scan(one, jnp.zeros(parents.shape), jnp.arange(1, parents.shape[1]))
    return depths.max(-1)


def _completed_values(tree: Any) -> Array:
    """The values ``[B, actions]`` of actions at the root; those that were not tried have the value
    v_mix (appendix D of the paper of Gumbel MuZero)."""
    root = tree.ROOT_INDEX
    visits, raw = tree.children_visits[:, root], tree.raw_values[:, root]
    values, tried = tree.qvalues(jnp.full(raw.shape, root)), visits > 0
    prior = jax.nn.softmax(tree.children_prior_logits[:, root])
    # As in mctx, so that an action of hardly any probability may be the only one that was tried.
    prior = jnp.maximum(prior, jnp.finfo(prior.dtype).tiny)
    share = jnp.where(tried, prior, 0).sum(-1)
    mean = jnp.where(tried, prior * values, 0).sum(-1) / jnp.where(share > 0, share, 1)
    mixed = (raw + visits.sum(-1) * mean) / (1 + visits.sum(-1))
    return jnp.where(tried, values, mixed[:, None])


def _policy(
    config: SearchConfig, noise: bool, temperature: Array | float, least_range: Array | float
) -> Callable[..., Any]:
    """mctx's policy with the settings of a search."""
    if config.policy == "gumbel":
        return partial(
            lib.gumbel_muzero_policy,
            qtransform=partial(
                lib.qtransform_completed_by_mix_value,
                value_scale=config.value_scale,
                epsilon=least_range,
            ),
            max_num_considered_actions=config.considered,
            gumbel_scale=1.0 if noise else 0.0,
        )
    return partial(
        lib.muzero_policy,
        dirichlet_fraction=config.dirichlet_fraction if noise else 0.0,
        dirichlet_alpha=config.dirichlet_alpha,
        qtransform=partial(lib.qtransform_by_parent_and_siblings, epsilon=least_range),
        temperature=temperature if noise else 0.0,
    )


def search(
    config: SearchConfig,
    step: Step,
    params: Params,
    keys: Array,
    roots: Roots,
    *,
    noise: bool = True,
    temperature: Array | float = 1.0,
    least_range: Array | float | None = None,
    keep_tree: bool = False,
    **options: Any,
) -> Found:
    """Searches from each root.

    Args:
      config: settings of the search.
      step: the model.
      params: its parameters.
      keys: ``[B]``, a random key for each root.
      roots: where the searches begin.
      noise: whether to explore; if not, the most visited action is chosen.
      temperature: of the policy "muzero", if ``noise``.
      least_range: what takes the place of that of ``config``.
      keep_tree: whether to return the trees as well.
      **options: further arguments of mctx's policy.

    Returns:
      What they have found. No gradient flows through it.
    """

    least_range = config.least_range if least_range is None else least_range
    policy = _policy(config, noise, temperature, least_range)

    def one(key: Array, root: Roots) -> Found:
        root = batch_of_one(root)
        logits = config.prior_exponent * root.logits
        start = lib.RootFnOutput(prior_logits=logits, value=root.value, embedding=root.state)
        invalid = None if root.legal is None else ~root.legal
        output = policy(params, key, start, step, config.simulations, invalid, **options)
        tree: Any = output.search_tree
        value = tree.node_values[:, tree.ROOT_INDEX]
        if config.policy == "gumbel":
            value = (output.action_weights * _completed_values(tree)).sum(-1)
        found = Found(
            output.action.astype(jnp.int32),
            output.action_weights,
            value,
            _depth(tree.parents),
            tree=tree if keep_tree else (),
        )
        return jax.tree.map(lambda x: x[0], found)

    return jax.lax.stop_gradient(jax.vmap(one)(keys, roots))


class Planner(NamedTuple):
    """Searches in a model that is learned.

    Attributes:
      config: settings of the searches.
      model: the model.
      support: of its rewards and values.
      discount: gamma of the agent.
      branches: what the branches of trees stand for.
    """

    config: SearchConfig
    model: Model
    support: Support
    discount: float
    branches: Branches = ALL_ACTIONS

    def predict(self, params: Params, observation: ArrayTree) -> tuple[Array, ArrayTree, Array]:
        """States, policies and values ``[B]`` of observations."""
        state = self.model.represent(params, observation)
        policy, value = self.model.predict(params, state)
        return state, policy, self.support.decode(value)

    def _step(
        self, params: Params, key: Array, branch: Array, node: tuple[Array, ArrayTree]
    ) -> tuple[Any, tuple[Array, ArrayTree]]:
        state, actions = node
        state, reward = self.model.step(params, state, self.branches.action(actions, branch))
        policy, value = self.model.predict(params, state)
        logits, actions = self.branches.grow(key, policy)
        discount = jnp.full(branch.shape, self.discount)
        decode = self.support.decode
        return outcome(decode(reward), discount, logits, decode(value)), (state, actions)

    def search(self, params: Params, keys: Array, observation: ArrayTree, **options: Any) -> Found:
        """Searches from observations ``[B, ...]``, see ``search``. Only there actions may be
        illegal: which ones are in the states that follow, the model does not say."""
        state, policy, value = self.predict(params, observation)
        logits, actions = self._grow(keys, policy)
        roots = Roots(logits, value, (state, actions), masks.legal(observation))
        found = search(self.config, self._step, params, keys, roots, **options)
        return found.replace(action=self.branches.action(actions, found.action), actions=actions)

    def _grow(self, keys: Array, policy: ArrayTree) -> tuple[Array, ArrayTree]:
        """The branches of roots, each drawn with a key of its own."""

        def one(key: Array, policy: ArrayTree) -> tuple[Array, ArrayTree]:
            key = jax.random.fold_in(key, BRANCHES_SALT)
            return jax.tree.map(lambda x: x[0], self.branches.grow(key, batch_of_one(policy)))

        return jax.vmap(one)(keys, policy)
