//! Where tools come from. A source knows the traits, the contexts, the descriptors and the errors,
//! and nothing above.

pub(crate) mod function;
