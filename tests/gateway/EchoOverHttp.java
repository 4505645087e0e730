import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.io.ByteArrayInputStream;

/** Sends requests as Java's own client does on its defaults, which offer an upgrade to HTTP/2, and prints each answer. */
public class EchoOverHttp {
    static final String CHAT = "{\"model\":\"fake\",\"max_tokens\":3,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";

    static HttpRequest.Builder to(String url) {
        return HttpRequest.newBuilder(URI.create(url)).header("content-type", "application/json");
    }

    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        HttpClient client = HttpClient.newHttpClient();
        byte[] chat = CHAT.getBytes(StandardCharsets.UTF_8);
        HttpRequest whole = to(url + "/v1/chat/completions").POST(BodyPublishers.ofByteArray(chat)).build();
        HttpRequest chunked = to(url + "/v1/chat/completions")
            .POST(BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(chat))).build();
        HttpRequest expecting = to(url + "/v1/chat/completions").expectContinue(true)
            .POST(BodyPublishers.ofByteArray(chat)).build();
        HttpRequest streamed = to(url + "/v1/chat/completions")
            .POST(BodyPublishers.ofString(CHAT.replace("\"max_tokens\"", "\"stream\":true,\"max_tokens\""))).build();
        String upload = "--x\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n"
            + "--x\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.jsonl\"\r\n\r\n{}\r\n--x--\r\n";
        HttpRequest file = HttpRequest.newBuilder(URI.create(url + "/v1/files"))
            .header("content-type", "multipart/form-data; boundary=x").POST(BodyPublishers.ofString(upload)).build();
        HttpRequest models = HttpRequest.newBuilder(URI.create(url + "/v1/models")).build();
        for (HttpRequest request : new HttpRequest[] {whole, chunked, expecting, streamed, file, models, whole}) {
            System.out.println(client.send(request, BodyHandlers.ofString()).statusCode());
        }
        List<CompletableFuture<Integer>> together = new ArrayList<>();
        for (int number = 0; number < 20; number++) {
            together.add(HttpClient.newHttpClient().sendAsync(whole, BodyHandlers.ofString()).thenApply(a -> a.statusCode()));
        }
        for (CompletableFuture<Integer> answer : together) {
            System.out.println(answer.get());
        }
    }
}
