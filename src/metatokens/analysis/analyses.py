"""The analyses by name. Each takes a model, examples and the fields that its records share."""

from metatokens.analysis.rate_distortion import rate_distortion
from metatokens.analysis.residual import residual
from metatokens.analysis.sharpness import sharpness

ANALYSES = {"sharpness": sharpness, "residual": residual, "rate-distortion": rate_distortion}
