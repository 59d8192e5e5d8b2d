#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "abi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagedkv {

namespace {

using Clock = std::chrono::steady_clock;

// A team ends when its last thread does. Longer than any item takes means that a thread had no core: others
// compute on this machine, and each call would wait for the next time slice (measured: 8 ms instead of 0.4).
constexpr auto kPatience = std::chrono::milliseconds(2);
constexpr auto kWithoutTeam = std::chrono::seconds(1);

// About 20 us: decode steps of consecutive layers come closer than that, and a longer spin takes the core
// from whoever else needs it.
constexpr int kSpins = 1000;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
  public:
    void run(Job job, void* context, int threads) {
        grow(threads - 1);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = job;
            context_ = context;
            places_ = threads - 1;
            epoch_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        job(context);
        close();
    }

  private:
    void grow(int helpers) {
        while (size_ < helpers) {
            try {
                std::thread(&Pool::help, this).detach();  // lives as long as the process
            } catch (const std::exception&) {
                return;  // no more threads to be had: those there are do the work
            }
            size_++;
        }
    }

    void close() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            places_ = 0;
        }
        for (int i = 0; i < kSpins && inside_.load(std::memory_order_acquire); i++) relax();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return inside_.load(std::memory_order_relaxed) == 0; });
    }

    void help() {
        unsigned seen = 0;
        for (;;) {
            for (int i = 0; i < kSpins && epoch_.load(std::memory_order_acquire) == seen; i++) relax();
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return epoch_.load(std::memory_order_relaxed) != seen; });
            seen = epoch_.load(std::memory_order_relaxed);
            if (places_ == 0) continue;
            places_--;
            inside_.fetch_add(1, std::memory_order_relaxed);
            const Job job = job_;
            void* const context = context_;
            lock.unlock();
            job(context);
            lock.lock();
            if (inside_.fetch_sub(1, std::memory_order_release) == 1) done_.notify_one();
        }
    }

    std::mutex mutex_;  // guards what follows
    std::condition_variable wake_, done_;
    std::atomic<unsigned> epoch_{0};  // counts jobs; read by spinning helpers
    std::atomic<int> inside_{0};      // helpers in the job; read by the spinning caller
    Job job_ = nullptr;
    void* context_ = nullptr;
    int places_ = 0;  // helpers that may still enter
    int size_ = 0;    // helpers there are; of the caller alone
};

std::atomic<Team> team{nullptr};
std::atomic_flag busy = ATOMIC_FLAG_INIT;  // set by the caller whose job runs, who alone uses what follows
Pool* pool = nullptr;
Clock::time_point team_again;  // until then the team is left alone

void forget_threads() {  // they do not exist in the child; the pool is not freed
    pool = nullptr;
    team.store(nullptr);
    busy.clear();
}

void run_alone_in_children() {
    static const int once = pthread_atfork(nullptr, nullptr, forget_threads);
    (void)once;
}

void run_on_pool(Job job, void* context, int threads) {
    run_alone_in_children();
    if (!pool) pool = new (std::nothrow) Pool;
    if (pool) return pool->run(job, context, threads);
    job(context);
}

struct TeamJob {
    Job job;
    void* context;
    pthread_t caller;
    Clock::time_point caller_done;
};

void run_in_team(void* given) {
    TeamJob& mine = *(TeamJob*)given;
    mine.job(mine.context);
    if (pthread_equal(pthread_self(), mine.caller)) mine.caller_done = Clock::now();
}

void run_on_team(Team all, Job job, void* context, int threads) {
    TeamJob shared{job, context, pthread_self(), {}};
    // a team that changes its size ends threads and starts others: it is always as large as torch's
    all(run_in_team, &shared, (unsigned)threads, 0);
    const Clock::time_point end = Clock::now();
    if (end - shared.caller_done > kPatience) team_again = end + kWithoutTeam;
}

}  // namespace

void run_on_threads(Job job, void* context, int threads, int64_t items) {
    if (threads < 2 || items < 2 || busy.test_and_set(std::memory_order_acquire)) return job(context);
    const Team all = team.load(std::memory_order_relaxed);
    if (all && Clock::now() >= team_again)
        run_on_team(all, job, context, threads);
    else
        run_on_pool(job, context, (int)std::min<int64_t>(threads, items));
    busy.clear(std::memory_order_release);
}

void use_team(Team given) {
    run_alone_in_children();
    while (busy.test_and_set(std::memory_order_acquire)) relax();
    team.store(given);
    team_again = {};
    busy.clear(std::memory_order_release);
}

}  // namespace pagedkv

PAGEDKV_EXPORT void pagedkv_use_team(void* gomp_parallel) { pagedkv::use_team((pagedkv::Team)gomp_parallel); }
