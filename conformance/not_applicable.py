"""The tests of the suite that cannot apply: which members, which tests, and the reason, reported with the skip."""

from suite import has_generation

NO_ROTARY = "there are no rotary positions to scale"
NO_PLAN = "the family has no plan for tensor parallelism"

NOT_APPLICABLE = [
    ("*_learned", "test_model_rope_scaling_*", NO_ROTARY),
    ("*_none", "test_model_rope_scaling_*", NO_ROTARY),
    *((members, "test_*tp_plan*", NO_PLAN) for members in ("*_learned", "*_none", "*_rope")),
]

if not has_generation():
    NOT_APPLICABLE.append(
        (
            "*",
            "test_generation_tester_mixin_inheritance",
            "the tests of generation were not fetched",
        )
    )
