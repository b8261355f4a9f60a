"""Any agent, unmodified: three chat APIs in front of the policy, which record what an agent does as token ids.

`env.agent` names a program. It runs as it is in the episode's sandbox (`agent`), where a small relay carries its
requests to the gateway of the env worker (`relay`, `channel`, `server`). OpenAI's chat completions, OpenAI's responses
and Anthropic's messages are read into one form (`exchange`), and each request is found to continue an earlier context
of the episode, token for token, or to begin one (`record`). So an episode may have branches, and all are trained on.

What differs from the APIs as their vendors serve them:

- The run says how the policy samples: a client's temperature, top_p and seed change nothing.
- An answer is generated before it is sent, so a stream has its text in one event.
- n > 1, log-probabilities, forced tool calls, stop sequences, structured output, images, the vendors' own tools and
  prefilled answers are refused with the API's own error (400), and so is every parameter that is not known.
- A request over `generator.max_model_len` is refused as the APIs do it (`context_length_exceeded`, "prompt is too
  long"), one beyond `env.max_turns` by `max_turns_exceeded`, and all are by 503 when the policy does not answer: the
  episode then has no reward.
- A tool call that is malformed is text.
"""
