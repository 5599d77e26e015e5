//! Strings at the edge: tokenizer, chat template, stop set, incremental decoding.
