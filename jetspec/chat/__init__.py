"""Chats in a terminal: the conversation, what answers, and the loop of questions and commands."""
