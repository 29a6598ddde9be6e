"""The vllm-0.5 dialect: the OpenAI layer of vLLM 0.5.5."""
