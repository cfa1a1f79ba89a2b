"""What the models do inside: sharpness of attention, the residual stream, rate and distortion of the meta-token."""
