"""A gateway for agents of others: three chat APIs in front of the policy, and what they were asked as token ids."""
