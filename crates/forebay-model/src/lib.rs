//! Model families as readable forward passes.
