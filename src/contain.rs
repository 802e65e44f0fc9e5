//! Foreign code, contained: nothing that a tool does may unwind into a caller or the keeper.

use std::any::Any;
use std::future::Future;
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
}

/// `make` is moved out before it runs and never pinned.
impl<'a, T, M: FnOnce() -> BoxFuture<'a, T>> Unpin for Contained<'a, T, M> {}

impl<'a, T, M: FnOnce() -> BoxFuture<'a, T>> Future for Contained<'a, T, M> {
    type Output = Result<T, Panicked<T>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let polled = contain(|| {
            if let Some(make) = this.make.take() {
                this.future = Some(make());
            }
            this.future
                .as_mut()
                .expect("BUG: a contained future was polled after it was done")
                .as_mut()
                .poll(cx)
        });
        match polled {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(value)) => Poll::Ready(match contain(|| this.future = None) {
                Ok(()) => Ok(value),
                Err(text) => Err(Panicked { text, value: Some(value) }),
            }),
            Err(text) => {
                drop_contained(this.future.take());
                Poll::Ready(Err(Panicked { text, value: None }))
            }
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
