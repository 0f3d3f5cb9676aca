//! Tests of explanations: planted causes, and the texts.

mod planted;
mod short;
mod told;
