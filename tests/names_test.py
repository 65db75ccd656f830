"""Errors for names that a module or a class does not have: they suggest an alternative."""

from __future__ import annotations

import pytest

import kdist
from kdist import names


@pytest.mark.kills("names_left_out_without_a_reason")
def test_a_wrong_name_is_answered_with_the_nearest_one():
    for module, name, answer in (
        (kdist, "MirorredStrategy", "Did you mean 'MirroredStrategy'?"),
        (kdist.experimental, "CommunicationOption", "Did you mean 'CommunicationOptions'?"),
        (kdist.cluster_resolver, "TFConfigResolver", "Did you mean 'TFConfigClusterResolver'?"),
        (kdist.coordinator, "ClusterCordinator", "Did you mean 'ClusterCoordinator'?"),
        (kdist, "CommunicationOptions", "Use kdist.experimental.CommunicationOptions."),
        (kdist, "BackupAndRestore", "Use kdist.callbacks.BackupAndRestore."),
        (kdist, "train", "Use kdist.Checkpoint and kdist.CheckpointManager."),
        (kdist.experimental, "rpc", "kdist.all_gather_object"),
        (kdist.experimental, "PreemptionWatcher", "Use kdist.experimental.PreemptionCheckpointHandler"),
        (kdist.cluster_resolver, "TPUResolver", "Did you mean 'TPUClusterResolver'?"),
    ):
        with pytest.raises(
            AttributeError, match=f"module '{module.__name__}' has no attribute '{name}'"
        ) as info:
            getattr(module, name)
        assert answer in str(info.value)
    assert not hasattr(kdist, "nothing_like_it")
    for place in [place for place in names.ELSEWHERE.values() if " " not in place]:
        _, home, name = place.split(".")
        assert name in getattr(kdist, home).__all__, place


def test_what_tensorflow_1_left_in_strategies_says_what_to_use_instead():
    default, member, unknown = kdist.get_strategy(), "unwrap", "unknown"
    for owner in (default, type(default), kdist.MirroredStrategy):
        assert not hasattr(owner, member)
        with pytest.raises(AttributeError, match="'unwrap'.*Use strategy.experimental_local_results"):
            getattr(owner, member)
    with pytest.raises(AttributeError, match="'unknown'"):
        getattr(default, unknown)
