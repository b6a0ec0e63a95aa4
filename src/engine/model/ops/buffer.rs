//! Memory of intermediate results, used again by the next layer and the next pass.
//!
//! What a pass makes on its way is megabytes that live for microseconds. Asked from the system each time,
//! their pages are cleared and mapped in anew, which took a tenth of a prompt's time.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

/// Most buffers of one type that wait for their next use.
const MOST_FREE: usize = 512;

/// Most bytes of one type that wait for their next use.
const MOST_FREE_BYTES: usize = 384 << 20;

/// What is put into buffers.
pub trait Reusable: Copy + Default + 'static {
    /// What buffers are filled with where assertions are on.
    const UNWRITTEN: Self;

    /// Returns the buffers of this type that nobody has.
    fn free_buffers() -> &'static FreeBuffers<Self>;
}

macro_rules! reusable {
    ($type:ty, $unwritten:expr) => {
        impl Reusable for $type {
            const UNWRITTEN: Self = $unwritten;

            fn free_buffers() -> &'static FreeBuffers<Self> {
                static FREE: FreeBuffers<$type> = FreeBuffers::new();
                &FREE
            }
        }
    };
}

reusable!(f32, f32::NAN);
reusable!(f64, f64::NAN);
// As pairs of bf16, these are no numbers either.
reusable!(u32, u32::MAX);

/// The buffers of one type that nobody has.
#[derive(Debug)]
pub struct FreeBuffers<T>(Mutex<Vec<Vec<T>>>);

impl<T: Reusable> FreeBuffers<T> {
    const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Takes the smallest buffer that is large enough, unless it is far too large.
    fn take(&self, len: usize) -> Option<Vec<T>> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = free
            .iter()
            .enumerate()
            .filter(|(_, buffer)| buffer.len() >= len && buffer.len() / 4 <= len);
        let (index, _) = fitting.min_by_key(|(_, buffer)| buffer.len())?;
        Some(free.swap_remove(index))
    }

    fn give_back(&self, buffer: Vec<T>) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(buffer);
        let bytes = |free: &[Vec<T>]| {
            free.iter()
                .map(|buffer| size_of_val(&**buffer))
                .sum::<usize>()
        };
        // The oldest first: those of batches that come no more.
        while free.len() > MOST_FREE || bytes(&free) > MOST_FREE_BYTES {
            free.remove(0);
        }
    }

    fn clear(&self) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *free = Vec::new();
    }
}

/// Frees the buffers that nobody has.
pub(crate) fn free_unused() {
    f32::free_buffers().clear();
    f64::free_buffers().clear();
    u32::free_buffers().clear();
}

/// Numbers that are whatever they are until they are written.
pub(crate) struct Buffer<T: Reusable> {
    values: Vec<T>,
    len: usize,
}

impl<T: Reusable> Buffer<T> {
    /// Returns `len` numbers, of which none may be read before it is written. Where assertions are on,
    /// they are not numbers, so that whoever does is found.
    pub(crate) fn new(len: usize) -> Self {
        let mut values = T::free_buffers()
            .take(len)
            .unwrap_or_else(|| vec![T::default(); len]);
        if cfg!(debug_assertions) {
            values.fill(T::UNWRITTEN);
        }
        Self { values, len }
    }
}

impl<T: Reusable> Drop for Buffer<T> {
    fn drop(&mut self) {
        T::free_buffers().give_back(std::mem::take(&mut self.values));
    }
}

impl<T: Reusable> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values[..self.len]
    }
}

impl<T: Reusable> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_that_fits_is_used_again() {
        let free = FreeBuffers::<f32>::new();
        for len in [100, 10, 50] {
            free.give_back(vec![0.0; len]);
        }
        assert_eq!(free.take(20).map(|buffer| buffer.len()), Some(50));
        assert_eq!(free.take(20), None, "100 is far too large");
        assert_eq!(free.take(25).map(|buffer| buffer.len()), Some(100));
        assert_eq!(free.take(11), None);
    }

    #[test]
    fn what_waits_is_bounded() {
        let free = FreeBuffers::<f64>::new();
        for len in 0..2 * MOST_FREE {
            free.give_back(vec![0.0; len]);
        }
        let lens: Vec<usize> = free.0.lock().unwrap().iter().map(Vec::len).collect();
        assert_eq!(lens, (MOST_FREE..2 * MOST_FREE).collect::<Vec<_>>());
        free.give_back(vec![0.0; MOST_FREE_BYTES / 8 + 1]);
        assert!(free.0.lock().unwrap().is_empty());
        free.give_back(vec![0.0; 3]);
        free.clear();
        assert_eq!(free.take(3), None);
    }
}
