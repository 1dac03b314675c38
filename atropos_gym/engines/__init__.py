"""Inference engines behind one protocol: ids in, ids and logprobs out, policy versions swapped while serving."""
