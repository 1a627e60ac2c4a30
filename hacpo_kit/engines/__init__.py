"""How an agent samples: one module an engine, each with `sample(agent, prompts, …)`."""
