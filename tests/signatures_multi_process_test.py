"""Names and arguments of `tf.distribute`, compared with TensorFlow's own."""

from __future__ import annotations

from tests.processes import run

# What TensorFlow has beside its documented names: leftovers of TensorFlow 1, and of named tuples.
LEFTOVERS = {
    "colocate_vars_with",
    "configure",
    "count",
    "experimental_run",
    "group",
    "index",
    "make_dataset_iterator",
    "make_input_fn_iterator",
    "unwrap",
    "update_config_proto",
}
# Users make neither: a strategy is made by its subclass, and makes the other.
MADE_INSIDE = {"Strategy", "StrategyExtended"}


def differences(left_out: set[str], made_inside: set[str]) -> list[str]:
    """What `tf.distribute` has, and kdist not, or in another way; run where TensorFlow is."""
    import inspect
    import types

    import tensorflow as tf

    import kdist
    import kdist.cluster_resolver
    import kdist.experimental

    found = []

    def arguments(function):
        kept = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        return [p.name for p in kept if p.name != "self"]

    def compare(name, theirs, ours):
        wanted, have = arguments(theirs), arguments(ours)
        if have[: len(wanted)] != wanted:
            found.append(f"{name}: {wanted} and here {have}")

    for theirs, ours in (
        (tf.distribute, kdist),
        (tf.distribute.experimental, kdist.experimental),
        (tf.distribute.cluster_resolver, kdist.cluster_resolver),
    ):
        for name in (name for name in dir(theirs) if not name.startswith("_")):
            native = getattr(theirs, name)
            if isinstance(native, types.ModuleType):
                continue
            try:
                own = getattr(ours, name)
            except AttributeError as error:
                if "yet." not in str(error):
                    found.append(f"{name}: missing, and {error}")
                continue
            if not inspect.isclass(native):
                compare(name, native, own)
                continue
            found += [
                f"{name}.{m}: missing" for m in getattr(native, "__members__", ()) if not hasattr(own, m)
            ]
            if name not in made_inside and not hasattr(native, "__members__"):
                compare(name, native, own)
            for member in dir(native):
                if member.startswith("_") or member in left_out:
                    continue
                if not hasattr(own, member):
                    found.append(f"{name}.{member}: missing")
                elif inspect.isfunction(getattr(native, member)):
                    compare(f"{name}.{member}", getattr(native, member), getattr(own, member))
    return found


def test_names_and_arguments_are_those_of_tensorflow() -> None:
    (found,) = run("tensorflow", 1, differences, LEFTOVERS, MADE_INSIDE)
    assert not found, "\n".join(found)
