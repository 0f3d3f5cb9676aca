//! Explanations: planted causes, and their texts.

mod planted;
mod told;
