//! Typed positions that cannot be confused: of VMs, of a VM's threads, of CPUs and of the scheduler's tasks. A thread of a VM is
//! a vCPU. Each vCPU is a task, and so is each daemon of the host.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Index, IndexMut};

use homenode_units::{Id, IdSet};

/// A position in lists of one kind.
pub(crate) trait Ix: Copy {
    /// Returns the position with this number, counted from 0.
    fn new(at: usize) -> Self;
    /// Returns the position's number.
    fn at(self) -> usize;
}

macro_rules! positions {
    ($($(#[$text:meta])* $name:ident;)*) => {$(
        $(#[$text])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) struct $name(pub usize);

        impl Ix for $name {
            #[inline]
            fn new(at: usize) -> Self {
                $name(at)
            }

            #[inline]
            fn at(self) -> usize {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

positions! {
    /// A VM, by its position in the scenario.
    VmIx;
    /// A thread of a VM's program, and the vCPU that it runs on.
    ThreadIx;
    /// A CPU of the host, by its position in the machine.
    CpuIx;
    /// A task of the host's scheduler.
    TaskIx;
}

/// CPUs of the host, by position.
pub(crate) type CpuIxSet = IdSet<CpuIx>;

impl Id for CpuIx {
    #[inline]
    fn number(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    fn from_number(number: u32) -> Self {
        CpuIx(number as usize)
    }
}

/// Returns the positions of the marks that are set.
pub(crate) fn marked<I: Ix, S: FromIterator<I>>(marks: impl IntoIterator<Item = bool>) -> S {
    let marks = marks.into_iter().enumerate();
    marks
        .filter(|(_, is_in)| *is_in)
        .map(|(at, _)| I::new(at))
        .collect()
}

/// Returns the first `count` positions.
pub(crate) fn first<I: Ix>(count: usize) -> impl ExactSizeIterator<Item = I> + Clone + use<I> {
    (0..count).map(I::new)
}

/// A list that is indexed by positions of one kind.
pub(crate) struct IxVec<I, T> {
    list: Vec<T>,
    of: PhantomData<fn(I)>,
}

impl<I: Ix, T> IxVec<I, T> {
    /// Creates an empty list.
    pub(crate) fn new() -> IxVec<I, T> {
        IxVec::from(Vec::new())
    }

    /// Creates a list of `count` copies of a value.
    pub(crate) fn filled(value: T, count: usize) -> IxVec<I, T>
    where
        T: Clone,
    {
        IxVec::from(vec![value; count])
    }

    /// Adds a value, and returns its position.
    pub(crate) fn push(&mut self, value: T) -> I {
        self.list.push(value);
        I::new(self.list.len() - 1)
    }

    /// Adds values.
    pub(crate) fn extend(&mut self, values: impl IntoIterator<Item = T>) {
        self.list.extend(values);
    }

    /// Returns the list's positions.
    pub(crate) fn places(&self) -> impl ExactSizeIterator<Item = I> + Clone + use<I, T> {
        first(self.list.len())
    }

    /// Returns the list's positions and values.
    pub(crate) fn placed(&self) -> impl ExactSizeIterator<Item = (I, &T)> + Clone {
        let places = self.list.iter().enumerate();
        places.map(|(at, value)| (I::new(at), value))
    }
}

impl<I, T> Default for IxVec<I, T> {
    fn default() -> IxVec<I, T> {
        IxVec::from(Vec::new())
    }
}

impl<I, T> From<Vec<T>> for IxVec<I, T> {
    fn from(list: Vec<T>) -> IxVec<I, T> {
        let of = PhantomData;
        IxVec { list, of }
    }
}

impl<I, T> FromIterator<T> for IxVec<I, T> {
    fn from_iter<V: IntoIterator<Item = T>>(values: V) -> IxVec<I, T> {
        IxVec::from(Vec::from_iter(values))
    }
}

impl<I: Ix, T> Index<I> for IxVec<I, T> {
    type Output = T;

    #[inline]
    fn index(&self, at: I) -> &T {
        &self.list[at.at()]
    }
}

impl<I: Ix, T> IndexMut<I> for IxVec<I, T> {
    #[inline]
    fn index_mut(&mut self, at: I) -> &mut T {
        &mut self.list[at.at()]
    }
}

impl<I, T> Deref for IxVec<I, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        &self.list
    }
}

impl<I, T> DerefMut for IxVec<I, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.list
    }
}

impl<'a, I, T> IntoIterator for &'a IxVec<I, T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.iter()
    }
}

impl<'a, I, T> IntoIterator for &'a mut IxVec<I, T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.iter_mut()
    }
}

// Implemented by hand, because a derive would also put bounds on `I`, although only the values are stored.
impl<I, T: Clone> Clone for IxVec<I, T> {
    fn clone(&self) -> Self {
        IxVec::from(self.list.clone())
    }

    fn clone_from(&mut self, other: &Self) {
        self.list.clone_from(&other.list);
    }
}

impl<I, T: fmt::Debug> fmt::Debug for IxVec<I, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.list.fmt(f)
    }
}
