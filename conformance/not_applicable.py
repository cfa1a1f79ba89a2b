"""The tests of the suite that cannot apply: which members, which tests, and the reason, reported with the skip."""

from suite import has_generation

NO_ROTARY = "there are no rotary positions to scale"

NOT_APPLICABLE = [
    ("*_learned", "test_model_rope_scaling_*", NO_ROTARY),
    ("*_none", "test_model_rope_scaling_*", NO_ROTARY),
]

if not has_generation():
    NOT_APPLICABLE.append(("*", "test_generation_tester_mixin_inheritance", "the tests of generation were not fetched"))
