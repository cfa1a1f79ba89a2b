"""Measurements inside models: sharpness of attention, the residual stream, rate and distortion."""
