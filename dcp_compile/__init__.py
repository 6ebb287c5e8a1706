# SPDX-License-Identifier: Apache-2.0
"""dcp_compile: decode context parallelism and speculative decoding for Hugging Face MLA models, as a compiler."""
