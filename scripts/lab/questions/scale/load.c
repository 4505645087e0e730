/* The load of `scripts/lab scale`, in C, so that it leaves the cores to the servers under test.

   load engine port=P
       An engine. A stream whose prompt ends with `every=T` has an event each T microseconds, the same for all that run
       at once; an answer that is not streamed comes at once.
   load clients port=P kind=K count=N rate=R tokens=L seconds=S [every=T] [words=W] [chars=C] [key=KEY] [seed=X]
       kind=streams  N streams, R of them begun a second. The load is steady when all have begun
       kind=short    R streams a second, of L events each, however many run
       kind=whole    N connections that ask again when they are answered, without streams
       Prompts have W words that are drawn anew for each request, and C characters more.

   The content of an event is the time of its sending, CLOCK_MONOTONIC in nanoseconds, as 16 hexadecimal digits: its
   delay is known to whoever reads it on this machine. The clients print "steady", "over" S seconds later, and what they
   have seen, as JSON: counts between the two, and histograms with 32 classes for each factor of two of a microsecond:
   of the delays of events between the two, and of the times to the first event, or to the whole answer. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define STAMP "\"content\":\""
#define STAMP_BYTES (sizeof STAMP - 1)
#define DIGITS 16
#define LAST_CHUNK "\r\n0\r\n\r\n"
#define PER_OCTAVE 32
#define CLASSES (PER_OCTAVE * 28) /* up to 268 s */
#define READ_BYTES 65536
#define FIRES_MAX 64 /* events that are sent between two looks at the sockets */
#define SETTLE_NS 500000000ull
#define WARM_NS 1000000000ull /* before a load without lasting streams is steady */
#define BEGIN_NS 60000000000ull /* in which all streams have to begin */
#define LATE_NS 10000000000ull  /* how long the last streams are waited for */

typedef struct conn {
    int fd;
    char *in; /* what was read and not understood yet */
    size_t have, room;
    struct conn *next; /* of the queue of the engine's streams, or of the idle connections */
    uint64_t due;      /* engine: of the next event.  clients: of the request */
    uint64_t period;   /* engine: between two events of the stream */
    long tokens;       /* engine: events of the stream */
    long sent;         /* engine: events so far */
    int usage, running, checked, begun, done;
} conn;

static int polled;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static const char *said(int argc, char **argv, const char *name, const char *otherwise) {
    size_t size = strlen(name);
    for (int i = 2; i < argc; i++)
        if (!strncmp(argv[i], name, size) && argv[i][size] == '=') return argv[i] + size + 1;
    return otherwise;
}

static long number(int argc, char **argv, const char *name) { return atol(said(argc, argv, name, "0")); }

static conn *watched(int fd) {
    int one = 1;
    conn *c = calloc(1, sizeof *c);
    if (!c) fail("memory");
    c->fd = fd;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(polled, EPOLL_CTL_ADD, fd, &e)) fail("epoll_ctl");
    return c;
}

/* 0: the other side is gone. Waits where the other side is slow to read. */
static int put(int fd, const char *data, size_t size) {
    while (size) {
        ssize_t n = send(fd, data, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) {
            struct pollfd p = {fd, POLLOUT, 0};
            poll(&p, 1, 1000);
        } else if (n < 0) {
            return 0;
        } else {
            data += n;
            size -= (size_t)n;
        }
    }
    return 1;
}

/* Add what a socket has to what was read before. 0: the other side is gone */
static int get(conn *c) {
    if (c->room - c->have < READ_BYTES) {
        c->room = c->have + 2 * READ_BYTES;
        if (!(c->in = realloc(c->in, c->room + 1))) fail("memory");
    }
    ssize_t n = recv(c->fd, c->in + c->have, READ_BYTES, 0);
    if (n < 0) return errno == EAGAIN;
    c->have += (size_t)n;
    return n > 0;
}

static void forget(conn *c, const char *until) {
    c->have -= (size_t)(until - c->in);
    memmove(c->in, until, c->have);
}

/* Bytes of the first message of `in` with its body; 0: not known yet. open : no length is told */
static size_t size_of(conn *c, int *open) {
    char *end = memmem(c->in, c->have, "\r\n\r\n", 4);
    if (!end) return 0;
    *end = 0;
    char *told = strcasestr(c->in, "content-length:");
    *end = '\r';
    *open = !told;
    return (size_t)(end - c->in) + 4 + (told ? (size_t)atol(told + 15) : 0);
}

/* ---- the engine ---- */

static conn *first, *last; /* streams, by the time of their next event: all have the same period */
static char event[512];
static size_t event_bytes;
static char *stamped;

static void queue(conn *c) {
    c->next = NULL;
    if (last) last->next = c;
    else first = c;
    last = c;
}

static void leave(conn *c) { /* a stream of the queue is freed when its turn comes */
    close(c->fd);
    c->fd = -1;
    free(c->in);
    c->in = NULL;
    if (!c->running) free(c);
}

static void make_event(void) {
    char body[400];
    int size = snprintf(body, sizeof body,
                        "data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\","
                        "\"created\":1700000000,\"model\":\"fake\",\"choices\":[{\"index\":0,\"delta\":{" STAMP
                        "0000000000000000\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    event_bytes = (size_t)snprintf(event, sizeof event, "%x\r\n%s\r\n", size, body);
    stamped = strstr(event, STAMP) + STAMP_BYTES;
}

static void send_event(conn *c, uint64_t now) {
    for (int i = DIGITS - 1; i >= 0; i--, now >>= 4) stamped[i] = "0123456789abcdef"[now & 15];
    if (!put(c->fd, event, event_bytes)) leave(c);
}

static void end_stream(conn *c) {
    char text[1024], usage[256] = "";
    if (c->usage)
        snprintf(usage, sizeof usage,
                 "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"fake\","
                 "\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":%ld,\"total_tokens\":%ld}}\n\n",
                 c->tokens, c->tokens + 9);
    char body[700];
    int size = snprintf(body, sizeof body,
                        "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":"
                        "\"fake\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n%s"
                        "data: [DONE]\n\n",
                        usage);
    int all = snprintf(text, sizeof text, "%x\r\n%s\r\n0\r\n\r\n", size, body);
    c->running = 0;
    if (!put(c->fd, text, (size_t)all)) leave(c);
}

static void fire(uint64_t now) {
    for (int i = 0; i < FIRES_MAX && first && first->due <= now; i++, now = now_ns()) {
        conn *c = first;
        first = c->next;
        if (!first) last = NULL;
        if (c->fd < 0) {
            free(c);
        } else if (c->sent++ < c->tokens) {
            send_event(c, now);
            c->due += c->period;
            queue(c);
        } else {
            end_stream(c);
        }
    }
}

static int answer(conn *c, const char *content_type, const char *body, const char *status) {
    char text[1024];
    int size = snprintf(text, sizeof text, "HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s", status,
                        content_type, strlen(body), body);
    return put(c->fd, text, (size_t)size);
}

static int has(const char *text, size_t size, const char *word) { return memmem(text, size, word, strlen(word)) != NULL; }

/* Answer the request that `in` begins with. 0: the client is gone */
static int serve(conn *c, size_t size) {
    static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    const char *in = c->in;
    if (!strncmp(in, "GET /v1/models", 14))
        return answer(c, "application/json", "{\"object\":\"list\",\"data\":[{\"id\":\"fake\",\"object\":\"model\"}]}",
                      "200 OK");
    if (!strncmp(in, "GET /health", 11)) return answer(c, "text/plain", "", "200 OK");
    if (strncmp(in, "POST", 4))
        return answer(c, "application/json", "{\"error\":{\"message\":\"no such path\"}}", "404 Not Found");
    if (!has(in, size, "\"stream\":true") && !has(in, size, "\"stream\": true"))
        return answer(c, "application/json",
                      "{\"id\":\"chatcmpl-0\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"fake\",\"choices\":[{"
                      "\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"a few words of an answer, and more\"},"
                      "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":16,"
                      "\"total_tokens\":25}}",
                      "200 OK");
    const char *most = memmem(in, size, "\"max_tokens\":", 13);
    c->tokens = most ? atol(most + 13) : 16;
    c->usage = has(in, size, "include_usage");
    c->sent = 0;
    const char *every = memmem(in, size, "every=", 6);
    c->period = (every ? (uint64_t)atol(every + 6) : 20000) * 1000;
    c->due = now_ns() + c->period;
    if (!put(c->fd, head, sizeof head - 1)) return 0;
    c->running = 1;
    queue(c);
    return 1;
}

static void take_requests(conn *c) {
    int open, there = get(c);
    size_t size;
    while (there && (size = size_of(c, &open)) && c->have >= size) {
        there = serve(c, size);
        forget(c, c->in + size);
    }
    if (!there) leave(c);
}

static void engine(int port) {
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 4096)) fail("listen");
    fcntl(listener, F_SETFL, O_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL}, ready[256];
    epoll_ctl(polled, EPOLL_CTL_ADD, listener, &e);
    make_event();
    for (;;) {
        uint64_t now = now_ns();
        fire(now);
        now = now_ns();
        uint64_t rest = first && first->due > now ? first->due - now : 0;
        struct timespec wait = {(time_t)(rest / 1000000000), (long)(rest % 1000000000)};
        int count = epoll_pwait2(polled, ready, 256, first ? &wait : NULL, NULL);
        for (int i = 0; i < count; i++) {
            conn *c = ready[i].data.ptr;
            if (!c) {
                int fd = accept(listener, NULL, NULL);
                if (fd >= 0) watched(fd);
            } else {
                take_requests(c);
            }
        }
    }
}

/* ---- the clients ---- */

static struct {
    int port, is_stream, is_closed;
    double rate, seconds;
    long count, words, chars;
    const char *key, *tokens, *every;
    uint64_t drawn;
} load;
static struct {
    uint64_t events, reads, ended, failed;
    unsigned delay[CLASSES], first[CLASSES];
} seen;
static long asked, begun, running;
static int is_recording;
static uint64_t first_from; /* times to the first event count for requests that were due then or later */
static char *body, *request;
static conn *idle;

static void note(unsigned *classes, uint64_t ns) {
    double us = (double)ns / 1e3;
    int at = us < 1.0 ? 0 : (int)(log2(us) * PER_OCTAVE);
    classes[at < CLASSES ? at : CLASSES - 1]++;
}

static size_t make_body(void) {
    char *at = body;
    at += sprintf(at, "{\"model\":\"fake\",\"max_tokens\":%s,%s\"messages\":[{\"role\":\"user\",\"content\":\"", load.tokens,
                  load.is_stream ? "\"stream\":true," : "");
    for (long i = 0; i < load.words; i++) {
        uint64_t d = load.drawn = load.drawn * 6364136223846793005ull + 1442695040888963407ull;
        at += sprintf(at, "%c%c%u ", 'a' + (int)(d >> 60), 'a' + (int)(d >> 56 & 15), (unsigned)(d >> 40) % 100);
    }
    for (long i = 0; i < load.chars; i++) *at++ = i % 5 == 4 ? ' ' : (char)('a' + i % 17);
    return (size_t)(at - body) + (size_t)sprintf(at, "How long is a piece of string? every=%s\"}]}", load.every);
}

static void ask(conn *c, uint64_t due) {
    static size_t made;
    if (!made || load.words) {
        size_t size = make_body();
        int head = sprintf(request,
                           "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nauthorization: Bearer %s\r\n"
                           "content-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                           load.port, load.key, size);
        memcpy(request + head, body, size);
        made = (size_t)head + size;
    }
    c->due = due;
    c->checked = c->begun = c->done = 0;
    c->have = 0;
    c->running = 1;
    running++;
    put(c->fd, request, made); /* a lost connection is seen by the next read */
}

static conn *connected(void) {
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)load.port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof at)) fail("connect");
    return watched(fd);
}

static void note_begun(conn *c, uint64_t now) {
    if (c->begun) return;
    c->begun = 1;
    begun++;
    if (c->due >= first_from) note(seen.first, now - c->due);
}

static void ended(conn *c, int well) {
    c->running = 0;
    running--;
    begun += !c->begun; /* nobody waits for it */
    seen.failed += !well;
    seen.ended += well && is_recording;
}

static uint64_t stamp_of(const char *digits) {
    uint64_t value = 0;
    for (int i = 0; i < DIGITS; i++)
        value = value << 4 | (uint64_t)(digits[i] <= '9' ? digits[i] - '0' : digits[i] - 'a' + 10);
    return value;
}

/* Take the events of a stream out of what was read. */
static void read_events(conn *c, uint64_t now) {
    char *at = c->in, *end = c->in + c->have, *found;
    uint64_t events = 0;
    while ((found = memmem(at, (size_t)(end - at), STAMP, STAMP_BYTES)) && end - found >= (long)(STAMP_BYTES + DIGITS)) {
        at = found + STAMP_BYTES;
        events++;
        if (is_recording) note(seen.delay, now - stamp_of(at));
    }
    if (events) note_begun(c, now);
    if (events && is_recording) seen.events += events, seen.reads++;
    c->done |= memmem(at, (size_t)(end - at), "[DONE]", 6) != NULL;
    if (memmem(at, (size_t)(end - at), LAST_CHUNK, sizeof LAST_CHUNK - 1)) {
        ended(c, c->done);
        return;
    }
    char *kept = found ? found : end - at > 64 ? end - 64 : at;
    forget(c, kept);
}

static void read_whole(conn *c, uint64_t now) {
    int open;
    size_t size = size_of(c, &open);
    if (!size || (open ? memcmp(c->in + c->have - 5, "0\r\n\r\n", 5) : c->have < size)) return;
    note_begun(c, now);
    ended(c, !strncmp(c->in, "HTTP/1.1 200", 12));
}

static void lose(conn *c) {
    if (c->running) ended(c, 0);
    for (conn **at = &idle; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    close(c->fd);
    free(c->in);
    free(c);
    if (load.is_closed) ask(connected(), now_ns());
}

static void take_answers(conn *c) {
    if (!get(c)) {
        lose(c);
        return;
    }
    uint64_t now = now_ns();
    if (!c->running) return;
    if (load.is_stream && !c->checked++ && strncmp(c->in, "HTTP/1.1 200", 12)) {
        fprintf(stderr, "%.*s\n", (int)(c->have < 400 ? c->have : 400), c->in);
        exit(1);
    }
    if (load.is_stream) read_events(c, now);
    else read_whole(c, now);
    if (c->running) return;
    if (load.is_closed) {
        ask(c, now);
    } else {
        c->next = idle;
        idle = c;
    }
}

static void print_classes(const char *name, const unsigned *classes) {
    printf(", \"%s\": {", name);
    for (int i = 0, count = 0; i < CLASSES; i++)
        if (classes[i]) printf("%s\"%d\": %u", count++ ? ", " : "", i, classes[i]);
    printf("}");
}

static void say(const char *word) {
    puts(word);
    fflush(stdout);
}

/* Processor time of this process so far, user and system. */
static double cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static uint64_t due_of(uint64_t begin) {
    return begin + (load.rate > 0 ? (uint64_t)((double)asked / load.rate * 1e9) : 0);
}

static void clients(int is_short) {
    struct epoll_event ready[256];
    int is_over = 0;
    double used_s = 0;
    uint64_t begin = now_ns(), end = 0, steady = is_short || load.is_closed ? begin + WARM_NS : 0;
    first_from = steady;
    for (uint64_t now = begin;; now = now_ns()) {
        for (; asked < load.count && due_of(begin) <= now; asked++) {
            conn *c = idle;
            if (c) idle = c->next;
            ask(c ? c : connected(), due_of(begin));
        }
        if (!steady && begun >= load.count) steady = now + SETTLE_NS;
        if (!steady && now > begin + BEGIN_NS) {
            fprintf(stderr, "%ld of %ld streams have begun within a minute\n", begun, load.count);
            exit(1);
        }
        if (steady && now >= steady && !end) {
            say("steady");
            used_s = cpu_s();
            is_recording = 1;
            steady = now;
            end = now + (uint64_t)(load.seconds * 1e9);
        }
        if (end && now >= end && !is_over) {
            say("over");
            used_s = cpu_s() - used_s;
            load.seconds = (double)(now - steady) / 1e9;
            is_recording = 0;
            is_over = 1;
        }
        if (is_over && (!is_short || begun >= asked || now > end + LATE_NS)) break;
        uint64_t until = is_over ? now + WARM_NS / 10 : end ? end : steady ? steady : now + WARM_NS / 10;
        if (asked < load.count && due_of(begin) < until) until = due_of(begin);
        uint64_t rest = until > now ? until - now : 0;
        struct timespec wait = {(time_t)(rest / 1000000000), (long)(rest % 1000000000)};
        int found = epoll_pwait2(polled, ready, 256, &wait, NULL);
        for (int i = 0; i < found; i++) take_answers(ready[i].data.ptr);
    }
    printf("{\"seconds\": %.6f, \"cpu_s\": %.6f, \"events\": %lu, \"reads\": %lu, \"ended\": %lu, \"failed\": %lu, \"late\": %ld",
           load.seconds, used_s, seen.events, seen.reads, seen.ended, seen.failed,
           load.is_closed ? 0 : asked - begun);
    print_classes("delay", seen.delay);
    print_classes("first", seen.first);
    say("}");
}

static void read_load(int argc, char **argv) {
    const char *kind = said(argc, argv, "kind", "streams");
    int is_short = !strcmp(kind, "short");
    load.is_closed = !strcmp(kind, "whole");
    load.is_stream = !load.is_closed;
    load.port = (int)number(argc, argv, "port");
    load.rate = atof(said(argc, argv, "rate", "0"));
    load.seconds = atof(said(argc, argv, "seconds", "5"));
    load.words = number(argc, argv, "words");
    load.chars = number(argc, argv, "chars");
    load.key = said(argc, argv, "key", "none");
    load.tokens = said(argc, argv, "tokens", "16");
    load.every = said(argc, argv, "every", "20000");
    load.drawn = (uint64_t)number(argc, argv, "seed") + 1;
    load.count = is_short ? (long)(load.rate * (load.seconds + WARM_NS / 1e9)) : number(argc, argv, "count");
    body = malloc((size_t)(load.chars + load.words * 8) + 4096);
    request = malloc((size_t)(load.chars + load.words * 8) + 8192);
    if (!body || !request) fail("memory");
    clients(is_short);
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    polled = epoll_create1(0);
    if (argc > 1 && !strcmp(argv[1], "engine")) {
        engine((int)number(argc, argv, "port"));
    } else if (argc > 1 && !strcmp(argv[1], "clients")) {
        read_load(argc, argv);
    } else {
        fputs("load engine|clients NAME=VALUE ...\n", stderr);
        return 2;
    }
    return 0;
}
