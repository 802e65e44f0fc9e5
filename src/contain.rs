//! Foreign code, contained: nothing that a tool does may unwind into a caller or the keeper.

use std::any::Any;
use std::future::Future;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

/// A boxed future, as `async_trait` makes them.
pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A panic of foreign code.
#[derive(Debug)]
pub(crate) struct Panicked<T = ()> {
    /// What it said.
    pub(crate) text: String,
    /// What the future had already given when its destructor panicked.
    pub(crate) value: Option<T>,
}

/// Runs foreign code.
pub(crate) fn contain<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        drop_contained(payload);
        text.unwrap_or_else(|| "a panic without a text".to_owned())
    })
}

/// Drops a value whose destructor may panic.
pub(crate) fn drop_contained<T>(value: T) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        forget_panic(payload);
    }
}

#[expect(
    clippy::mem_forget,
    reason = "the payload of a panic in a destructor may panic again when dropped"
)]
fn forget_panic(payload: Box<dyn Any + Send>) {
    std::mem::forget(payload);
}

/// A value of foreign code, whose destructor is contained.
pub(crate) struct Foreign<T>(Option<T>);

impl<T> Foreign<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    pub(crate) fn into_inner(mut self) -> T {
        self.0.take().expect("BUG: a foreign value is there until it is dropped")
    }
}

impl<T> Deref for Foreign<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("BUG: a foreign value is there until it is dropped")
    }
}

impl<T> Drop for Foreign<T> {
    fn drop(&mut self) {
        drop_contained(self.0.take());
    }
}

/// A future of foreign code whose making, polls and drop are contained.
#[must_use = "futures do nothing unless polled"]
pub(crate) struct Contained<'a, T, M: FnOnce() -> BoxFuture<'a, T>> {
    make: Option<M>,
    future: Option<BoxFuture<'a, T>>,
}

impl<'a, T, M: FnOnce() -> BoxFuture<'a, T>> Contained<'a, T, M> {
    /// `make` runs at the first poll.
    pub(crate) fn new(make: M) -> Self {
        Self { make: Some(make), future: None }
    }

    /// Polls, and puts the value straight into its place: carrying it out through the catch costs
    /// more than the catch. True when it is done; a panic in the drop of the future comes after its
    /// value.
    pub(crate) fn poll_into(
        &mut self,
        place: &mut Option<T>,
        cx: &mut Context<'_>,
    ) -> Result<bool, String> {
        let polled = contain(|| {
            if let Some(make) = self.make.take() {
                self.future = Some(make());
            }
            let future =
                self.future.as_mut().expect("BUG: a contained future was polled after it was done");
            let Poll::Ready(value) = future.as_mut().poll(cx) else {
                return false;
            };
            *place = Some(value);
            self.future = None;
            true
        });
        if polled.is_err() {
            drop_contained(self.future.take());
        }
        polled
    }
}

/// `make` is moved out before it runs and never pinned.
impl<'a, T, M: FnOnce() -> BoxFuture<'a, T>> Unpin for Contained<'a, T, M> {}

impl<'a, T, M: FnOnce() -> BoxFuture<'a, T>> Future for Contained<'a, T, M> {
    type Output = Result<T, Panicked<T>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut value = None;
        let polled = self.poll_into(&mut value, cx);
        match (polled, value) {
            (Ok(_), Some(value)) => Poll::Ready(Ok(value)),
            (Ok(_), None) => Poll::Pending,
            (Err(text), value) => Poll::Ready(Err(Panicked { text, value })),
        }
    }
}

impl<'a, T, M: FnOnce() -> BoxFuture<'a, T>> Drop for Contained<'a, T, M> {
    fn drop(&mut self) {
        if self.future.is_some() {
            drop_contained(self.future.take());
        }
        if self.make.is_some() {
            drop_contained(self.make.take());
        }
    }
}
