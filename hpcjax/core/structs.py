"""Frozen dataclasses as pytrees."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """Declares a field that is part of the tree's structure, not a leaf."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(static,)
)
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass whose fields are pytree children.

    Fields declared with `static()` become part of the structure and must be hashable.

    Examples:
      >>> @pytree
      ... class Pair:
      ...   left: int
      ...   name: str = static(default="pair")
      >>> jax.tree.leaves(Pair(left=3))
      [3]
    """
    struct = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(struct)  # pyrefly: ignore[bad-argument-type]
    meta = [field.name for field in fields if field.metadata.get("static")]
    data = [field.name for field in fields if field.name not in meta]
    jax.tree_util.register_dataclass(struct, data_fields=data, meta_fields=meta)
    return struct
