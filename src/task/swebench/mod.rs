//! SWE-bench: issues of real repositories, each mended by a patch and judged by its tests.
//!
//! A [`SwebenchInstance`] is one row of the data set, whatever file it came from. [`divide`] parts
//! the rows into those to learn from and those to measure on. How a patch is judged is said in
//! [`crate::grader::swebench`].

mod divide;
mod instance;
mod repository;

pub(super) use divide::held_out;
pub use divide::{SwebenchSplit, divide};
pub use instance::SwebenchInstance;
