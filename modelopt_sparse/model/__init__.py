"""What is known of a user's model: its layers, blocks, experts, masks, and where its weights lie."""
