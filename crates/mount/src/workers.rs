//! Threads for accesses that no request of the kernel waits for: readahead and write-behind.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use terrace_sync::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    has_ended: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// A pool of threads. Dropping it drops the jobs that wait, and waits for those that run.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts the threads.
    ///
    /// # Errors
    /// If the system has no more threads.
    pub(crate) fn start(count: usize) -> io::Result<Workers> {
        let shared = Arc::<Shared>::default();
        let mut workers = Workers { shared: shared.clone(), threads: Vec::with_capacity(count) };
        for _ in 0..count {
            let shared = shared.clone();
            let thread = thread::Builder::new().name("mount-io".into()).spawn(move || run_jobs(&shared))?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// Adds a job at the end of the queue.
    pub(crate) fn submit(&self, job: impl FnOnce() + Send + 'static) {
        self.shared.queue.lock().jobs.push_back(Box::new(job));
        self.shared.changed.notify_one();
    }

    /// The number of jobs that wait.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.shared.queue.lock().jobs.len()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let dropped = {
            let mut queue = self.shared.queue.lock();
            queue.has_ended = true;
            std::mem::take(&mut queue.jobs)
        };
        drop(dropped);
        self.shared.changed.notify_all();
        let own = thread::current().id();
        for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != own) {
            // A panic of a job has been printed by the thread.
            let _ = thread.join();
        }
    }
}

fn run_jobs(shared: &Shared) {
    loop {
        let job = {
            let mut queue = shared.queue.lock();
            loop {
                if queue.has_ended {
                    return;
                }
                match queue.jobs.pop_front() {
                    Some(job) => break job,
                    None => shared.changed.wait(&mut queue),
                }
            }
        };
        job();
    }
}
